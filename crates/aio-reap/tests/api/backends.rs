//! The same work on every real backend.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crate::common::{REAL, on_engines, on_every_backend, small};
use crate::direct_file::direct_file;
use crate::readable::{assert_quiet, readable};
use aio_reap::{
    AlignedBuf, AllocateMode, BackendKind, BufList, CompletionQueue, Engine, EngineBuilder,
    ReapMode, SubmitError,
};
use bytes::BytesMut;

/// Much longer than a disk takes.
const PATIENCE: Duration = Duration::from_secs(60);

fn aligned(len: usize, byte: u8) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed(len, 4096);
    buf.fill(byte);
    buf
}

#[test]
fn read_write_sync_allocate() {
    on_every_backend(|engine| {
        let file = engine.attach(tempfile::tempfile().unwrap()).unwrap();
        let (written, _) = engine.write(&file, vec![7; 10_000], 0).submit().unwrap().wait();
        assert_eq!(written.unwrap(), 10_000);
        for sync in [engine.fsync(&file), engine.fdatasync(&file)] {
            assert_eq!(sync.submit().unwrap().wait().0.unwrap(), 0);
        }

        // The read fills only the bytes of the file; the rest of the buffer stays.
        let (read, buf) = engine.read(&file, vec![1; 8], 9_996).submit().unwrap().wait();
        assert_eq!((read.unwrap(), buf), (4, vec![7, 7, 7, 7, 1, 1, 1, 1]));
        let request = engine.read(&file, vec![1; 8], 9_996).zero_fill();
        let (read, buf) = request.submit().unwrap().wait();
        assert_eq!((read.unwrap(), buf), (8, vec![7, 7, 7, 7, 0, 0, 0, 0]));

        for mode in [AllocateMode::PunchHole, AllocateMode::ZeroRange] {
            let (result, ()) = engine.allocate(&file, mode, 0, 4096).submit().unwrap().wait();
            if result.as_ref().is_err_and(|e| e.errno() == libc::EOPNOTSUPP) {
                continue; // tmpfs has no ZERO_RANGE
            }
            result.unwrap();
            let (_, buf) = engine.read(&file, vec![1; 4097], 0).submit().unwrap().wait();
            assert!(buf[..4096].iter().all(|&byte| byte == 0) && buf[4096] == 7);
            let (result, ()) = engine.allocate(&file, mode, 8192, 8192).submit().unwrap().wait();
            result.unwrap();
            let size = std::fs::File::from(file.as_fd().try_clone_to_owned().unwrap());
            let size = size.metadata().unwrap().len();
            assert_eq!(size, if mode == AllocateMode::PunchHole { 10_000 } else { 16_384 });
        }
        let (reserved, ()) =
            engine.allocate(&file, AllocateMode::Reserve, 0, 20_000).submit().unwrap().wait();
        reserved.unwrap();
        let (empty, _) = engine.write(&file, Vec::new(), 0).submit().unwrap().wait();
        assert_eq!(empty.unwrap(), 0);
    });
}

#[test]
fn errors_reach_only_their_request() {
    on_every_backend(|engine| {
        let good = engine.attach(tempfile::tempfile().unwrap()).unwrap();
        let read_only = engine.attach(std::fs::File::open("/dev/null").unwrap()).unwrap();
        let plug = engine.plug();
        let before = engine.write(&good, vec![1; 100], 0).submit().unwrap();
        let refused = engine.write(&read_only, vec![2; 100], 0).submit().unwrap();
        let after = engine.write(&good, vec![3; 100], 100).submit().unwrap();
        drop(plug);
        assert_eq!(before.wait().0.unwrap(), 100);
        let (error, buf) = refused.wait();
        assert_eq!((error.unwrap_err().errno(), buf), (libc::EBADF, vec![2; 100]));
        assert_eq!(after.wait().0.unwrap(), 100);
    });
}

#[test]
fn direct_files_are_aligned_or_refused() {
    on_every_backend(|engine| {
        let Some((_keep, file)) = direct_file(engine) else { return };
        let align = file.alignment().unwrap();
        assert!(align.offset >= 512 && align.offset <= 4096);
        let unaligned = engine.write(&file, aligned(4096, 1), 1).submit();
        assert!(matches!(unaligned, Err(SubmitError::Misaligned(_))));
        // At an odd address, as one buffer and in a list.
        let odd = || {
            let mut buf = BytesMut::zeroed(4097);
            drop(buf.split_to(1 - buf.as_ptr().addr() % 2));
            buf.truncate(4096);
            buf
        };
        let list = BufList::new(vec![odd()]).unwrap();
        let refused = [
            matches!(engine.write(&file, odd(), 0).submit(), Err(SubmitError::Misaligned(_))),
            matches!(
                engine.write_vectored(&file, list, 0).submit(),
                Err(SubmitError::Misaligned(_))
            ),
        ];
        assert_eq!(refused, [align.memory > 1; 2]);
        // A read across an unaligned end of the file stops there.
        let write = std::fs::OpenOptions::new().write(true).open(_keep.path()).unwrap();
        write.set_len(65_536 + 100).unwrap();
        engine.fdatasync(&file).submit().unwrap().wait().0.unwrap();
        let (read, _) = engine.read(&file, aligned(8192, 99), 61_440).submit().unwrap().wait();
        assert_eq!(read.unwrap(), 4096 + 100);
    });
}

/// Before the program asks for the descriptor, notifications may stay. An event loop that asks late is
/// notified of the requests in flight, of each later one, and of nothing afterwards.
#[test]
fn inv09_a_late_poll_sees_later_completions_and_then_nothing() {
    for mode in [ReapMode::OnTurn, ReapMode::AfterSubmit] {
        on_engines(small().reap_mode(mode), |engine| {
            let Some((_keep, file)) = direct_file(engine) else { return };
            for block in 0..5u64 {
                let write = engine.write(&file, aligned(4096, 1), block * 4096).submit().unwrap();
                assert_eq!(write.wait().0.unwrap(), 4096);
            }
            let queue = CompletionQueue::new();
            for block in 0..50u64 {
                engine.write(&file, aligned(4096, 2), block * 4096).enqueue(&queue, block).unwrap();
                let start = Instant::now();
                while queue.pop().is_none() {
                    assert!(readable(engine, PATIENCE), "lost wake-up");
                    engine.turn();
                    assert!(start.elapsed() < PATIENCE);
                }
            }
            assert_quiet(engine, engine);
        });
    }
}

extern "C" fn ignore(_signal: libc::c_int) {}

/// The handler does not restart system calls, so the sleep of the wait ends with `EINTR`.
#[test]
fn inv20_a_signal_ends_no_wait() {
    // SAFETY: every field of a `sigaction` may be zero.
    let mut action: libc::sigaction = unsafe { std::mem::MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = ignore as *const () as usize;
    // SAFETY: the handler does nothing, `action` outlives the call, and a null old one is allowed.
    let ret = unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()) };
    assert_eq!(ret, 0);
    // SAFETY: the call has no condition.
    let me = unsafe { libc::pthread_self() };
    on_every_backend(|engine| {
        let (reader, writer) = std::io::pipe().unwrap();
        let pipe = engine.attach(reader).unwrap();
        let read = engine.read(&pipe, vec![0; 1], 0).submit().unwrap(); // waits, if the kernel can
        if read.is_done() || engine.backend() != BackendKind::Uring {
            return;
        }
        for timeout in [Some(Duration::from_millis(60)), None] {
            let end = writer.try_clone().unwrap();
            let start = Instant::now(); // before the start of the thread, which ends the wait
            let sender = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(20));
                // SAFETY: that thread waits for this one.
                assert_eq!(unsafe { libc::pthread_kill(me, libc::SIGUSR1) }, 0);
                std::thread::sleep(Duration::from_millis(60));
                if timeout.is_none() {
                    io::Write::write_all(&mut { end }, b"x").unwrap();
                }
            });
            let delivered = engine.wait(timeout).unwrap().delivered;
            assert_eq!(delivered, usize::from(timeout.is_none()));
            assert!(start.elapsed() >= Duration::from_millis(60), "the signal has ended it");
            sender.join().unwrap();
        }
        assert_eq!(read.wait().0.unwrap(), 1);
    });
}

/// A thread has 16 numbers for its rings. More engines work too, and dropped ones free their numbers.
#[test]
fn a_thread_may_have_more_engines_than_numbers_of_rings() {
    for _ in 0..3 {
        let engines: Vec<_> =
            (0..18).map(|_| Engine::builder().depth(1).build().unwrap()).collect();
        for engine in &engines {
            engine.nop().submit().unwrap().wait().0.unwrap();
        }
    }
}

#[test]
fn automatic_choice_says_why_it_fell_back() {
    let engine = Engine::new().unwrap();
    let tried: Vec<_> = engine.fallbacks().iter().map(|fallback| fallback.backend).collect();
    let expected = REAL.iter().position(|&kind| kind == engine.backend()).unwrap();
    assert_eq!(tried, REAL[..expected]);
    assert!(Engine::builder().depth(0).build().is_err());
    assert!(Engine::builder().depth(40_000).build().is_err());
}

#[test]
fn limits_out_of_range_are_refused_with_their_value() {
    let text = |builder: EngineBuilder| builder.build().unwrap_err().to_string();
    let builder = || Engine::builder().backend(BackendKind::Threads);
    assert_eq!(text(builder().depth(0)), "depth is 0, but must be from 1 to 32768");
    assert_eq!(text(builder().threads(1025)), "threads is 1025, but must be from 1 to 1024");
    let error = builder().capacity(8).depth(64).build().unwrap_err();
    assert_eq!(error.to_string(), "capacity is 8, but must be from 64 to 16777216");
    assert_eq!(error.errno(), libc::EINVAL);
}
