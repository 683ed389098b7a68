//! Each fuzz target has a small committed corpus, and a test on stable Rust that replays it.
//!
//! `fuzz/` is a workspace of its own, for nightly: what is left out of it fails nothing there. A corpus is
//! replayed by a test of the crate that the target is about: a file below `tests` that names its folder.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The largest size of one corpus in bytes: a clone and a replay should not notice it.
const MOST: u64 = 256 << 10;
/// The names of committed inputs, as in `fuzz/.gitignore`; files with other names are finds of local runs.
const COMMITTED: [&str; 3] = ["captured-", "found-", "seed-"];

/// Says what is wrong with the fuzz targets below `root`; nothing if all is well.
fn problems(root: &Path) -> Vec<String> {
    let fuzz = root.join("fuzz");
    let manifest = fs::read_to_string(fuzz.join("Cargo.toml")).unwrap_or_default();
    let listed = listed(&manifest);
    let programs: BTreeSet<String> = names(&fuzz.join("fuzz_targets"))
        .iter()
        .map(|name| name.trim_end_matches(".rs").to_string())
        .collect();
    let corpora = names(&fuzz.join("corpus"));
    let replays = replays(root);

    let mut wrong = Vec::new();
    if listed.is_empty() {
        wrong.push("fuzz/Cargo.toml lists no target".to_string());
    }
    for name in listed.union(&programs) {
        if !listed.contains(name) {
            wrong.push(format!("fuzz/fuzz_targets/{name}.rs is not in fuzz/Cargo.toml"));
        }
        if !programs.contains(name) {
            wrong.push(format!("{name} has no file in fuzz/fuzz_targets"));
        }
        match bytes(&fuzz.join("corpus").join(name)) {
            0 => wrong.push(format!("{name} has no corpus")),
            bytes if bytes > MOST => wrong.push(format!("the corpus of {name} has {bytes} bytes")),
            _ => {}
        }
        let folder = format!("fuzz/corpus/{name}\"");
        if !replays.iter().any(|source| source.contains(&folder)) {
            wrong.push(format!("no test replays the corpus of {name}"));
        }
    }
    wrong.extend(
        corpora.difference(&listed).map(|name| format!("fuzz/corpus/{name} is of no target")),
    );
    wrong
}

/// The names of a manifest's programs.
fn listed(manifest: &str) -> BTreeSet<String> {
    let programs = manifest.split("[[bin]]").skip(1);
    let name = |program: &str| {
        let line = program.lines().find_map(|line| line.strip_prefix("name = "))?;
        Some(line.trim().trim_matches('"').to_string())
    };
    programs.filter_map(name).collect()
}

/// Returns the entries of a folder; none if there is no such folder.
fn names(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

/// Of what is committed of a corpus.
fn bytes(corpus: &Path) -> u64 {
    let committed = |name: &String| COMMITTED.iter().any(|kind| name.starts_with(kind));
    let inputs = names(corpus).into_iter().filter(committed);
    inputs.map(|name| fs::metadata(corpus.join(name)).unwrap().len()).sum()
}

/// The sources below every `tests` folder that have a test.
fn replays(root: &Path) -> Vec<String> {
    let crates = names(&root.join("crates")).into_iter().map(|name| Path::new("crates").join(name));
    let folders = crates.chain([PathBuf::from("examples")]);
    let mut sources = Vec::new();
    folders.for_each(|folder| add_sources(&root.join(folder).join("tests"), &mut sources));
    sources.retain(|source| source.contains("#[test]"));
    sources
}

fn add_sources(folder: &Path, sources: &mut Vec<String>) {
    for name in names(folder) {
        let path = folder.join(name);
        if path.is_dir() {
            add_sources(&path, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push(fs::read_to_string(path).unwrap());
        }
    }
}

#[test]
fn every_fuzz_target_has_a_small_corpus_and_a_test_that_replays_it() {
    let wrong = problems(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// The check itself, on a folder made for it.
#[test]
fn the_check_sees_whatever_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let (targets, corpus) = (root.join("fuzz/fuzz_targets"), root.join("fuzz/corpus"));
    let tests = root.join("crates/some/tests");
    for folder in [&targets, &corpus.join("ops"), &tests] {
        fs::create_dir_all(folder).unwrap();
    }
    let manifest = root.join("fuzz/Cargo.toml");
    let (program, input, test) =
        (targets.join("ops.rs"), corpus.join("ops/seed-1"), tests.join("ops.rs"));
    let replay = "#[test]\nfn replay() { run(\"../../fuzz/corpus/ops\") }\n";
    let whole = || {
        fs::write(&manifest, "[package]\nname = \"fuzz\"\n\n[[bin]]\nname = \"ops\"\n").unwrap();
        fs::write(&program, "").unwrap();
        fs::write(&input, [0; 9]).unwrap();
        fs::write(&test, replay).unwrap();
    };
    let wrong = |change: &dyn Fn()| {
        whole();
        change();
        problems(root)
    };
    assert_eq!(wrong(&|| ()), [""; 0]);
    assert_eq!(
        wrong(&|| fs::remove_file(&program).unwrap()),
        ["ops has no file in fuzz/fuzz_targets"]
    );
    assert_eq!(wrong(&|| fs::remove_file(&input).unwrap()), ["ops has no corpus"]);
    assert_eq!(
        wrong(&|| fs::write(&input, vec![0; MOST as usize + 1]).unwrap()),
        ["the corpus of ops has 262145 bytes"]
    );
    assert_eq!(wrong(&|| fs::remove_file(&test).unwrap()), ["no test replays the corpus of ops"]);
    assert_eq!(
        wrong(&|| fs::write(&test, replay.replace("ops", "other_ops")).unwrap()),
        ["no test replays the corpus of ops"]
    );
    assert_eq!(
        wrong(&|| fs::write(&manifest, "[package]\nname = \"fuzz\"\n").unwrap()),
        [
            "fuzz/Cargo.toml lists no target",
            "fuzz/fuzz_targets/ops.rs is not in fuzz/Cargo.toml",
            "fuzz/corpus/ops is of no target"
        ]
    );
    fs::rename(&input, corpus.join("ops/0123abcd")).unwrap();
    assert!(problems(root).contains(&"ops has no corpus".into()), "found here, not committed");
}
