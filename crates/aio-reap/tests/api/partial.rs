//! Short transfers that end their requests.

use std::io::{Read, Write, pipe};

use aio_reap::{BackendKind, BufList, Engine};
use aio_reap_test::Build;
use aio_reap_test::scripted::{Script, Transfer};
use common::on_every_backend;

use crate::common;

#[test]
fn inv11_a_partial_transfer_ends_where_its_first_system_call_ended() {
    on_every_backend(|engine| {
        let file = engine.attach(tempfile::tempfile().unwrap()).unwrap();
        engine.write(&file, b"abc", 0).partial().submit().unwrap().wait().0.unwrap();
        let end = engine.read(&file, vec![7; 9], 0).exact().partial().submit().unwrap().wait();
        assert_eq!((end.0.unwrap(), &end.1[..4]), (3, &b"abc\x07"[..]));
        let end = engine.read(&file, vec![7; 9], 3).zero_fill().partial().submit().unwrap().wait();
        assert_eq!((end.0.unwrap(), end.1[0]), (0, 7));
        if engine.backend() != BackendKind::Uring {
            return; // the others have no requests on pipes
        }
        let (reader, mut writer) = pipe().unwrap();
        let file = engine.attach(reader).unwrap();
        let read = engine.read(&file, vec![0; 100], 0).partial().submit().unwrap();
        writer.write_all(b"abc").unwrap();
        let (moved, buf) = read.wait();
        assert_eq!((moved.unwrap(), &buf[..4]), (3, &b"abc\0"[..]));
        writer.write_all(b"defg").unwrap();
        let list = BufList::new(vec![vec![0; 2]; 9]).unwrap();
        let (moved, list) = engine.read_vectored(&file, list, 0).partial().submit().unwrap().wait();
        assert_eq!((moved.unwrap(), &list[1][..], &list[2][..]), (4, &b"fg"[..], &[0, 0][..]));
        drop(writer);
        let end = engine.read(&file, vec![7; 100], 0).exact().partial().submit().unwrap().wait();
        assert_eq!((end.0.unwrap(), end.1[0]), (0, 7));

        // A write fills a pipe that does not block, which `write` alone would wait for.
        let (mut reader, writer) = pipe().unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&writer);
        // SAFETY: the call takes no pointer.
        assert_eq!(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) }, 0);
        let file = engine.attach(writer).unwrap();
        let write = engine.write(&file, vec![1; 1 << 20], 0).partial().submit().unwrap();
        let moved = write.wait().0.unwrap();
        assert!(moved > 0 && moved < 1 << 20, "{moved} of {}", engine.backend());
        let mut bytes = vec![0; moved];
        reader.read_exact(&mut bytes).unwrap();
    });
}

#[test]
fn inv11_a_partial_transfer_is_neither_continued_nor_filled_nor_an_error() {
    let script = Script::new();
    let engine = Engine::builder().build_scripted(&script).unwrap();
    let file = engine.attach(tempfile::tempfile().unwrap()).unwrap();
    script.on_transfer(Transfer::Short(3));
    let (written, _) = engine.write(&file, b"abcdef", 0).partial().submit().unwrap().wait();
    assert_eq!(written.unwrap(), 3);
    script.on_transfer(Transfer::Fail(libc::EINTR)); // no transfer yet
    script.on_transfer(Transfer::Short(2));
    let read = engine.read(&file, vec![9; 8], 0).zero_fill().partial().submit().unwrap().wait();
    assert_eq!((read.0.unwrap(), &read.1[..3]), (2, &b"ab\x09"[..]));
    assert_eq!(script.log(), [0, 0, 0]);
    assert_eq!((engine.stats().short, engine.stats().retries), (0, 1));
    assert_eq!(engine.stats().short, 0);
}
