//! Buffers belong to the engine until the kernel no longer uses them, also if the operation is
//! dropped or forgotten. Patterns show late writes, and AddressSanitizer sees every access to freed
//! memory:
//!
//! ```sh
//! ASAN_OPTIONS=detect_leaks=0 RUSTFLAGS=-Zsanitizer=address \
//!     cargo +nightly test -p aio-reap --target x86_64-unknown-linux-gnu --tests
//! ```
//!
//! (Forgotten operations leak on purpose.)

use std::cell::Cell;
use std::fs::File as StdFile;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use aio_reap::{
    AlignedBuf, BufList, CompletionQueue, Engine, File, IoBuf, IoBufMut, OpenOptions, Operation,
    ReapMode,
};

use crate::common::{engines, fifo};
use crate::counted::{Counted, OnDrop};
use crate::scripted::scripted;

const BLOCK: usize = 4096;
const BLOCKS: u64 = 64;

/// Opens a direct file if the file system allows it, so that requests stay in flight for a while.
fn file(engine: &Engine) -> (tempfile::NamedTempFile, File) {
    let temp = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut options = StdFile::options();
    let direct = options.read(true).write(true).custom_flags(libc::O_DIRECT).open(temp.path());
    let attached = engine.attach(direct.unwrap_or_else(|_| temp.reopen().unwrap())).unwrap();
    (temp, attached)
}

fn byte_of(round: u64, block: u64) -> u8 {
    (round * 31 + block * 7 + 1) as u8
}

/// Returns whether each block has the bytes of this round.
fn has_arrived(temp: &tempfile::NamedTempFile, round: u64) -> bool {
    let mut bytes = vec![0; BLOCK * BLOCKS as usize];
    temp.as_file().read_exact_at(&mut bytes, 0).unwrap();
    let mut blocks = (0..).zip(bytes.chunks(BLOCK));
    blocks.all(|(block, bytes)| bytes.iter().all(|&byte| byte == byte_of(round, block)))
}

/// Operations are dropped at once, forgotten, or kept. Each write arrives whole, and no buffer is
/// freed in flight.
#[test]
fn inv13_writes_land_whole_when_their_operations_are_dropped_or_forgotten() {
    for engine in engines(Engine::builder().depth(32).capacity(256)) {
        let (temp, file) = file(&engine);
        let freed = Arc::new(AtomicU64::new(0));
        let mut forgotten = 0;
        for round in 0..6u64 {
            let forgotten_before = forgotten;
            let mut kept = Vec::new();
            let plug = engine.plug();
            for block in 0..BLOCKS {
                let buf = Counted::new(BLOCK, byte_of(round, block), &freed);
                let write = engine.write(&file, buf, block * BLOCK as u64).submit().unwrap();
                match block % 3 {
                    0 => drop(write),
                    1 if forgotten < 20 => {
                        forgotten += 1;
                        std::mem::forget(write);
                    }
                    _ => kept.push(write),
                }
            }
            let before = round * BLOCKS - forgotten_before;
            assert_eq!(freed.load(Ordering::Relaxed), before, "freed before it was even submitted");
            drop(plug);
            engine.drain().unwrap();
            kept.into_iter().for_each(|write: Operation<_>| {
                assert_eq!(write.wait().0.unwrap(), BLOCK);
            });
            // All buffers but the forgotten ones are freed.
            assert_eq!(freed.load(Ordering::Relaxed), (round + 1) * BLOCKS - forgotten);
            assert!(has_arrived(&temp, round), "{}: round {round}", engine.backend());
        }
        engine.validate();
        // The drop of the engine waits for the requests in flight, so no buffer is freed early.
        for block in 0..BLOCKS {
            let buf = Counted::new(BLOCK, byte_of(6, block), &freed);
            drop(engine.write(&file, buf, block * BLOCK as u64).submit().unwrap());
        }
        drop(engine);
        assert_eq!(freed.load(Ordering::Relaxed), 7 * BLOCKS - forgotten);
        assert!(has_arrived(&temp, 6));
    }
}

/// The completion of a request that has the last handle of its queue frees the queue, and with it
/// buffers whose `Drop` uses the engine.
#[test]
fn buffers_of_an_unowned_queue_may_use_the_engine_in_their_drop() {
    let (engine, script) = scripted(4);
    let engine = Rc::new(engine);
    let freed = Rc::new(Cell::new(0));
    let file = engine.attach(tempfile::tempfile().unwrap()).unwrap();
    let queue = CompletionQueue::new();
    for token in 0..3 {
        let (user, freed) = (Rc::downgrade(&engine), Rc::clone(&freed));
        let again = move || {
            freed.set(freed.get() + 1);
            if let Some(engine) = user.upgrade() {
                engine.nop().callback(|_, ()| ()).unwrap();
            }
        };
        engine.write(&file, OnDrop(vec![7], again), token).enqueue(&queue, token).unwrap();
    }
    drop(queue);
    script.complete(3);
    engine.turn();
    engine.validate();
    assert_eq!(script.in_flight(), 0, "submitted inside a drop");
    assert_eq!((freed.get(), engine.turn().in_flight), (3, 3));
    script.complete(3);
    engine.drain().unwrap();
}

#[test]
fn an_aligned_buffer_keeps_its_bytes_and_its_bounds() {
    let mut buf = AlignedBuf::zeroed(8192, 4096);
    buf[8191] = 7;
    buf.set_len(100);
    buf.set_len(8192);
    assert_eq!((buf[8190], buf[8191]), (0, 7));
    assert!(catch_unwind(AssertUnwindSafe(|| buf.set_len(8193))).is_err());
    assert!(AlignedBuf::try_zeroed(8192, 3).is_none());
    assert!(AlignedBuf::try_zeroed(isize::MAX as usize, 4096).is_none());
    let refused = BufList::new(vec![Vec::<u8>::new(); 1025]).unwrap_err();
    assert_eq!(refused.len(), 1025);
}

/// Each kind of buffer transfers exactly its length, and comes back as it was given.
#[test]
fn inv13_every_kind_of_buffer_keeps_its_bytes() {
    use bytes::{Bytes, BytesMut};
    crate::common::on_every_backend(|engine| {
        let file = engine.attach(tempfile::tempfile().unwrap()).unwrap();
        let mut offset = 0;
        fn write<B: IoBuf + Clone + PartialEq>(engine: &Engine, file: &File, buf: B, at: &mut u64) {
            let (sent, len) = (buf.clone(), buf.len());
            let (written, back) = engine.write(file, buf, *at).submit().unwrap().wait();
            assert!(written.unwrap() == len && back == sent);
            *at += len as u64;
        }
        let mut spare = String::with_capacity(100);
        spare.push_str("two");
        write(engine, &file, spare, &mut offset);
        write(engine, &file, "one", &mut offset);
        write(engine, &file, b"three", &mut offset);
        write(engine, &file, vec![b'4'; 2].into_boxed_slice(), &mut offset);
        let mut halves = BytesMut::from(&b"fivesix"[..]);
        let six = halves.split_off(4);
        write(engine, &file, halves, &mut offset);
        let shared: Bytes = six.freeze();
        let other = shared.clone();
        write(engine, &file, shared.slice(1..), &mut offset);
        write(engine, &file, Bytes::from_static(b"7"), &mut offset);
        assert_eq!(other, &b"six"[..]);
        let expected = b"twoonethree44fiveix7";
        assert_eq!(offset, expected.len() as u64);

        fn read<B: IoBufMut + AsRef<[u8]>>(engine: &Engine, file: &File, buf: B) {
            let (address, len) = (buf.as_ptr(), buf.len());
            let (read, back) = engine.read(file, buf, 3).submit().unwrap().wait();
            assert_eq!(
                (read.unwrap(), back.as_ref(), back.as_ptr()),
                (len, &b"onethree"[..len], address)
            );
        }
        read(engine, &file, vec![0; 8].into_boxed_slice());
        let mut pair = BytesMut::zeroed(10);
        let rest = pair.split_off(8);
        read(engine, &file, pair);
        assert_eq!(&rest[..], [0, 0]);
        let (empty, _) = engine.read(&file, Box::<[u8]>::default(), 0).submit().unwrap().wait();
        assert_eq!(empty.unwrap(), 0);
    });
}

/// A value whose drop panics, after it has noted whether `ended` was set.
struct Panicking(Arc<AtomicBool>, Rc<Cell<Option<bool>>>);

impl Drop for Panicking {
    fn drop(&mut self) {
        self.1.set(Some(self.0.load(Ordering::Relaxed)));
        panic!("on purpose");
    }
}

/// The end of an engine during a panic drops what a callback owns only after the kernel has given
/// back every other buffer, because such a drop may panic too.
#[test]
fn inv13_no_value_is_dropped_at_the_end_while_a_request_is_in_flight() {
    for engine in engines(Engine::builder().reap_mode(ReapMode::OnTurn)) {
        let kind = engine.backend();
        let (_folder, path) = fifo();
        let (ended, seen) = (Arc::new(AtomicBool::new(false)), Rc::new(Cell::new(None)));
        let mut slow = None;
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let engine = engine; // dropped while the panic unwinds
            let value = Panicking(Arc::clone(&ended), Rc::clone(&seen));
            engine.nop().callback(move |_, ()| drop(value)).unwrap();
            // The open waits until the other end is opened, on io_uring if it truncates.
            let options = OpenOptions::write_only().flags(libc::O_TRUNC);
            slow = Some(engine.open(&path, options).submit().unwrap());
            panic!("on purpose");
        }));
        assert!(panicked.is_err() && seen.get().is_none(), "{kind}");
        let other_end = std::thread::spawn({
            let ended = Arc::clone(&ended);
            move || {
                std::thread::sleep(Duration::from_millis(50));
                ended.store(true, Ordering::Relaxed);
                StdFile::open(path).unwrap();
            }
        });
        let last = catch_unwind(AssertUnwindSafe(|| drop(slow)));
        assert!(last.is_err(), "{kind}: the value is dropped by the end of the engine");
        assert_eq!(seen.get(), Some(true), "{kind}: dropped while the open was in flight");
        other_end.join().unwrap();
    }
}
