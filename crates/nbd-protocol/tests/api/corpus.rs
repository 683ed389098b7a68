//! The corpus of the fuzz target `nbd_protocol`, replayed.
//!
//! `fuzz/corpus/nbd_protocol` holds three kinds of inputs: `seed-*`, one per option, command and
//! reply; `captured-*`, what nbdinfo, nbdcopy, qemu-io, qemu-img and
//! fio said to a server and what it replied; `found-*`, what the fuzzer added to their coverage.

use std::fs;

use crate::driven;

#[test]
fn inv04_every_input_of_the_corpus_holds() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/nbd_protocol");
    let mut names = Vec::new();
    for entry in fs::read_dir(corpus).expect("the corpus is committed") {
        let path = entry.unwrap().path();
        let input = fs::read(&path).unwrap();
        println!("{}", path.display()); // shown if it panics
        driven::run(&input);
        // As it is, and in every other length of pieces.
        for piece in 0..64 {
            let [mode, rest @ ..] = &input[..] else { continue };
            driven::run(&[&[piece << 2 | mode & 3], rest].concat());
        }
        names.push(path.file_name().unwrap().to_string_lossy().into_owned());
    }
    let kinds = [("seed-", 80), ("captured-session-", 1), ("captured-replies-", 1), ("found-", 1)];
    for (kind, least) in kinds {
        let many = names.iter().filter(|name| name.starts_with(kind)).count();
        assert!(many >= least, "{many} of {kind}* in the corpus");
    }
}
