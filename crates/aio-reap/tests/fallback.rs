//! If a backend cannot start, for whatever error, the next one is tried.
//!
//! A filter on one thread's system calls (seccomp) makes them fail with a chosen error. Only
//! threads that this thread starts later inherit it. If a filter cannot be installed, the tests
//! print that and pass, unless `OFFLOCK_REQUIRE_ALL` is set.
#![cfg(all(target_arch = "x86_64", not(offlock_model)))]

#[path = "common/readable.rs"]
mod readable;

use std::io;
use std::thread;
use std::time::Duration;

use aio_reap::{BackendKind, Engine, StartError};

const URING_CALLS: [i64; 2] = [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter];
/// The errors with which the kernel, containers and service managers refuse io_uring.
const REFUSALS: [i32; 5] =
    [libc::EPERM, libc::ENOSYS, libc::ENOMEM, libc::EINVAL, libc::EOPNOTSUPP];

/// Makes each of `calls` fail on this thread, until it ends.
fn refuse(calls: &[(i64, i32)]) -> io::Result<()> {
    let statement = |code: u32, value: u32, skip: u8| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: skip,
        k: value,
    };
    let mut program = vec![
        // The number of the call is the first word of `struct seccomp_data`.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
    ];
    for &(call, errno) in calls {
        program.push(statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, call as u32, 1));
        let refused = libc::SECCOMP_RET_ERRNO | errno as u32;
        program.push(statement(libc::BPF_RET | libc::BPF_K, refused, 0));
    }
    program.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0));
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the call takes no pointer.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mode = libc::SECCOMP_MODE_FILTER;
    // SAFETY: `program`, and the statements that it points to, live until the call returns.
    if unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Runs `test` on a new thread on which `calls` fail.
fn refusing(calls: &[(i64, i32)], test: impl FnOnce() + Send) {
    thread::scope(|scope| {
        let thread = scope.spawn(|| match refuse(calls) {
            Ok(()) => test(),
            Err(error) => {
                assert!(std::env::var_os("OFFLOCK_REQUIRE_ALL").is_none(), "seccomp: {error}");
                eprintln!("skipped: no filter can be installed: {error}");
            }
        });
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

fn aio_works() -> bool {
    Engine::builder().backend(BackendKind::Aio).build().is_ok()
}

/// Checks that the engine works on its backend.
fn exercise(engine: &Engine) {
    let file = engine.attach(tempfile::tempfile().unwrap()).unwrap();
    let plug = engine.plug();
    let writes: Vec<_> = (0..8u8)
        .map(|block| engine.write(&file, vec![block; 100], u64::from(block) * 100).submit())
        .collect();
    drop(plug);
    for write in writes {
        assert_eq!(write.unwrap().wait().0.unwrap(), 100);
    }
    let (read, buf) = engine.read(&file, vec![9; 800], 0).submit().unwrap().wait();
    assert_eq!(read.unwrap(), 800);
    assert!((0..).zip(&buf).all(|(at, &byte)| byte == (at / 100) as u8));
    engine.fdatasync(&file).submit().unwrap().wait().0.unwrap();
}

/// Returns the backends that the automatic choice tried without success, with the errors.
fn refused_by(engine: &Engine) -> Vec<(BackendKind, Option<i32>)> {
    let of = |fallback: &aio_reap::Fallback| (fallback.backend, fallback.reason.raw_os_error());
    engine.fallbacks().iter().map(of).collect()
}

#[test]
fn io_uring_refused_with_any_error_at_any_call_falls_back() {
    let next = if aio_works() { BackendKind::Aio } else { BackendKind::Threads };
    for call in URING_CALLS {
        for errno in REFUSALS {
            refusing(&[(call, errno)], || {
                let engine = Engine::new().unwrap();
                assert_eq!(engine.backend(), next, "call {call} refused with {errno}");
                assert_eq!(refused_by(&engine)[0], (BackendKind::Uring, Some(errno)));
                exercise(&engine);

                let forced = Engine::builder().backend(BackendKind::Uring).build();
                let Err(error @ StartError::Refused(_)) = forced else { panic!("{forced:?}") };
                assert_eq!(error.errno(), errno);
                assert!(error.to_string().contains("io_uring"), "{error}");
            });
        }
    }
    // Without a registration the ring is entered by its descriptor.
    let with_it = Engine::new().unwrap().backend();
    refusing(&[(libc::SYS_io_uring_register, libc::EPERM)], || {
        let engine = Engine::new().unwrap();
        assert_eq!(engine.backend(), with_it);
        exercise(&engine);
    });
}

#[test]
fn linux_aio_refused_falls_back_to_threads() {
    for errno in [libc::EAGAIN, libc::ENOSYS, libc::EPERM, libc::ENOMEM, libc::EINVAL] {
        let calls = [(libc::SYS_io_uring_setup, libc::EPERM), (libc::SYS_io_setup, errno)];
        refusing(&calls, || {
            let engine = Engine::new().unwrap();
            assert_eq!(engine.backend(), BackendKind::Threads);
            let expected =
                [(BackendKind::Uring, Some(libc::EPERM)), (BackendKind::Aio, Some(errno))];
            assert_eq!(refused_by(&engine), expected);
            exercise(&engine);
        });
    }
}

#[test]
fn when_threads_are_refused_too_the_error_names_all_three() {
    let calls = [
        (libc::SYS_io_uring_setup, libc::EPERM),
        (libc::SYS_io_setup, libc::ENOSYS),
        (libc::SYS_clone3, libc::EAGAIN),
        (libc::SYS_clone, libc::EAGAIN),
    ];
    refusing(&calls, || {
        let Err(error) = Engine::new() else { panic!("started without any backend") };
        assert_eq!(error.errno(), libc::EAGAIN);
        let text = error.to_string();
        for name in ["io_uring", "Linux AIO", "threads"] {
            assert!(text.contains(name), "{text}");
        }
        assert_eq!(io::Error::from(error).kind(), io::ErrorKind::WouldBlock);
    });
}

/// `aio-max-nr` is used up: the engine's 32,768 requests do not fit beside those of this test,
/// which leaves room for contexts of modest size elsewhere on the system.
#[test]
fn linux_aio_without_room_in_aio_max_nr_falls_back_to_threads() {
    let most = std::fs::read_to_string("/proc/sys/fs/aio-max-nr").unwrap_or_default();
    let Ok(most @ 40_000..200_000) = most.trim().parse::<u32>() else {
        eprintln!("skipped: aio-max-nr is {most:?}");
        return;
    };
    let mut context: libc::c_ulong = 0;
    // SAFETY: the kernel stores one id.
    let ret = unsafe { libc::syscall(libc::SYS_io_setup, most - 25_000, &raw mut context) };
    if ret != 0 {
        eprintln!("skipped: {}", io::Error::last_os_error());
        return;
    }
    refusing(&[(libc::SYS_io_uring_setup, libc::EPERM)], || {
        let engine = Engine::builder().depth(32_768).build().unwrap();
        assert_eq!(engine.backend(), BackendKind::Threads);
        assert_eq!(refused_by(&engine)[1], (BackendKind::Aio, Some(libc::EAGAIN)));
        exercise(&engine);
        let forced = Engine::builder().depth(32_768).backend(BackendKind::Aio).build();
        assert_eq!(forced.unwrap_err().errno(), libc::EAGAIN);
    });
    // SAFETY: this test made the context and does not use it again.
    unsafe { libc::syscall(libc::SYS_io_destroy, context) };
}

/// If the kernel refuses to watch one more descriptor, the engine's descriptor is always readable
/// instead of never.
#[test]
fn unwatched_completions_keep_the_descriptor_readable() {
    let readable = |engine: &Engine| readable::readable(engine, Duration::ZERO);
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let engine = Engine::new().unwrap();
            if let Err(error) = refuse(&[(libc::SYS_epoll_ctl, libc::ENOSPC)]) {
                assert!(std::env::var_os("OFFLOCK_REQUIRE_ALL").is_none(), "seccomp: {error}");
                return;
            }
            let _remote = engine.remote(); // its calls signal the kick too, so a turn empties it
            for _ in 0..3 {
                assert!(readable(&engine));
                engine.turn();
            }
            exercise(&engine);
            assert!(readable(&engine));
        });
        thread.join().unwrap();
    });
    let engine = Engine::new().unwrap();
    assert!(!readable(&engine), "watched");
    exercise(&engine);
    engine.turn();
    assert!(!readable(&engine));
}
