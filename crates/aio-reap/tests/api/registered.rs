//! Registered files and buffers give the same results as unregistered ones, and their numbers are
//! reused.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use aio_reap::{AllocateMode, BackendKind, BufferPool, Engine, File, PoolBuf};
use aio_reap_test::Build;
use aio_reap_test::scripted::Script;
use common::on_every_backend;
use direct::direct_file;

use crate::common;
use crate::direct_file as direct;

fn write_and_read_back(engine: &Engine, file: &File, pool: &BufferPool) {
    let mut bufs: Vec<PoolBuf> = std::iter::from_fn(|| pool.checkout()).collect();
    assert_eq!((bufs.len(), pool.available()), (pool.count(), 0));
    for (nth, buf) in (1u8..).zip(&mut bufs) {
        buf.fill(nth);
    }
    let plug = engine.plug();
    let writes: Vec<_> = (0u64..)
        .zip(bufs)
        .map(|(nth, buf)| engine.write(file, buf, nth * 4096).submit().unwrap())
        .collect();
    drop(plug);
    writes.into_iter().for_each(|write| assert_eq!(write.wait().0.unwrap(), 4096));
    assert_eq!(pool.available(), pool.count(), "dropped buffers come back");
    engine.fdatasync(file).submit().unwrap().wait().0.unwrap();
    for nth in 0..pool.count() as u64 {
        let mut buf = pool.checkout().unwrap();
        buf.fill(0xee);
        let (read, buf) = engine.read_exact(file, buf, nth * 4096).submit().unwrap().wait();
        assert_eq!(read.unwrap(), 4096);
        assert!(buf.iter().all(|&byte| u64::from(byte) == nth + 1));
    }
}

#[test]
fn inv15_registered_files_and_buffers_do_the_same_everywhere() {
    on_every_backend(|engine| {
        let uring = engine.backend() == BackendKind::Uring;
        let pool = BufferPool::new(engine, 8, 4096).unwrap();
        assert_eq!(pool.refusal().is_none(), uring, "{pool:?}");
        let Some((temp, plain)) = direct_file(engine) else { return };
        assert!(!plain.is_registered());
        let again = plain.as_fd().try_clone_to_owned().unwrap();
        let direct = engine.attach_registered(again).unwrap();
        let buffered = engine.attach_registered(temp.reopen().unwrap()).unwrap();
        assert_eq!((direct.is_registered(), buffered.is_registered()), (uring, uring));
        for file in [&plain, &direct, &buffered] {
            write_and_read_back(engine, file, &pool);
            // Every operation on a registered file.
            engine.fsync(file).submit().unwrap().wait().0.unwrap();
            engine.will_need(file, 0, 4096).submit().unwrap().wait().0.unwrap();
            let punch = engine.allocate(file, AllocateMode::PunchHole, 0, 4096);
            punch.submit().unwrap().wait().0.unwrap();
            let (read, buf) =
                engine.read(file, pool.checkout().unwrap(), 0).submit().unwrap().wait();
            assert_eq!(read.unwrap(), 4096);
            assert!(buf.iter().all(|&byte| byte == 0));
        }
        // A part of a registered buffer that is not at its start, with short transfers.
        let mut buf = pool.checkout().unwrap();
        buf.set_len(100);
        buf.fill(9);
        let (written, buf) = engine.write(&buffered, buf, 11).submit().unwrap().wait();
        assert_eq!((written.unwrap(), buf.len()), (100, 100));
        let size = temp.as_file().metadata().unwrap().len();
        let read = engine.read(&buffered, pool.checkout().unwrap(), size - 1000);
        let (read, _) = read.submit().unwrap().wait();
        assert_eq!(read.unwrap(), 1000);
    });
}

/// Numbers belong to one engine. Another engine uses the same file and buffer without them.
#[test]
fn registrations_work_only_with_their_engine() {
    on_every_backend(|engine| {
        let other = Engine::builder().backend(engine.backend()).build().unwrap();
        // The same numbers name other files there.
        let _decoy = other.attach_registered(tempfile::tempfile().unwrap()).unwrap();
        let _pool = BufferPool::new(&other, 1, 64).unwrap();
        let raw = tempfile::tempfile().unwrap();
        let file = engine.attach_registered(raw.try_clone().unwrap()).unwrap();
        let pool = BufferPool::new(engine, 4, 4096).unwrap();
        write_and_read_back(&other, &file, &pool);
        assert_eq!(raw.metadata().unwrap().len(), 4 * 4096);
    });
}

/// Many more files and pools than numbers are made and dropped, also while requests that use them
/// are in flight.
#[test]
fn numbers_are_used_again() {
    on_every_backend(|engine| {
        let uring = engine.backend() == BackendKind::Uring;
        let mut previous = None;
        for round in 0..300u64 {
            let raw = tempfile::tempfile().unwrap();
            let file = engine.attach_registered(raw.try_clone().unwrap()).unwrap();
            assert_eq!(file.is_registered(), uring, "round {round}");
            let pool = BufferPool::new(engine, 1, 512).unwrap();
            assert_eq!(pool.refusal().is_none(), uring, "round {round}");
            let mut buf = pool.checkout().unwrap();
            buf.fill(round as u8);
            let write = engine.write(&file, buf, 0).submit().unwrap();
            drop((file, pool)); // the request keeps both
            if let Some((write, raw, byte)) = previous.replace((write, raw, round as u8)) {
                let (written, _): (_, PoolBuf) = aio_reap::Operation::wait(write);
                assert_eq!(written.unwrap(), 512);
                let mut bytes = [0; 512];
                raw.read_exact_at(&mut bytes, 0).unwrap();
                assert_eq!(bytes, [byte; 512]);
            }
        }
    });
}

/// The drop of the last clone of a registered file closes its descriptor, and the next turn
/// unregisters it.
#[test]
fn a_dropped_registered_file_is_closed() {
    on_every_backend(|engine| {
        let (reader, writer) = std::io::pipe().unwrap();
        let file = engine.attach_registered(writer).unwrap();
        drop(file);
        engine.turn();
        // The read would block if a writer were left; without one it is the end of the file. The
        // kernel may close the file a moment later.
        let mut poll = libc::pollfd {
            fd: std::os::fd::AsRawFd::as_raw_fd(&reader),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: the pointer is to one valid pollfd.
        let ready = unsafe { libc::poll(&raw mut poll, 1, 5000) };
        assert_eq!((ready, poll.revents & libc::POLLHUP), (1, libc::POLLHUP));
    });
}

#[test]
fn more_than_there_are_numbers_work_without() {
    on_every_backend(|engine| {
        let uring = engine.backend() == BackendKind::Uring;
        let files: Vec<File> = (0..258)
            .map(|_| engine.attach_registered(tempfile::tempfile().unwrap()).unwrap())
            .collect();
        let registered = files.iter().filter(|file| file.is_registered()).count();
        assert_eq!(registered, if uring { 256 } else { 0 });
        let pools: Vec<_> = (0..34).map(|_| BufferPool::new(engine, 1, 4096).unwrap()).collect();
        let refused = pools.iter().filter(|pool| pool.refusal().is_some()).count();
        assert_eq!(refused, if uring { 2 } else { 34 });
        for (file, pool) in files.iter().rev().zip(pools.iter().rev()).take(4) {
            write_and_read_back(engine, file, pool);
        }
    });
}

#[test]
fn pools_outlive_their_engine_and_refuse_the_impossible() {
    let script = Script::new();
    let engine = Engine::builder().build_scripted(&script).unwrap();
    for (count, size, errno) in [
        (0, 4096, libc::EINVAL),
        (1, 0, libc::EINVAL),
        (usize::MAX, 4096, libc::ENOMEM),
        (1, usize::MAX, libc::ENOMEM),
        (1 << 20, 1 << 44, libc::ENOMEM),
    ] {
        let refused = BufferPool::new(&engine, count, size).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(errno), "{count} of {size}");
    }
    let pool = BufferPool::new(&engine, 2, 10).unwrap();
    let mut buf = pool.checkout().unwrap();
    drop((pool, engine));
    buf.fill(3);
    buf.set_len(4);
    assert_eq!((&buf[..], buf.capacity()), (&[3; 4][..], 10));
}
