//! Waits that end with a signal.

use std::ffi::CString;
use std::future::Future;
use std::io::{ErrorKind, pipe};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::pin::Pin;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use aio_reap::{BackendKind, Engine, File, OpenOptions, ReapMode};
use aio_reap_test::Build;
use aio_reap_test::scripted::{Script, Transfer};
use common::on_every_backend;

use crate::common;

static HANDLED: AtomicUsize = AtomicUsize::new(0);
/// A guess; much longer than a signal takes.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

extern "C" fn handle(_signal: libc::c_int) {
    HANDLED.fetch_add(1, Ordering::SeqCst);
}

/// Installs the handler, as programs do, so that it restarts system calls.
fn install() {
    // SAFETY: every field of a `sigaction` may be zero.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = handle as *const () as usize;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the handler only adds to an atomic, and `action` outlives the call.
    assert_eq!(unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, ptr::null_mut()) }, 0);
}

/// Returns the set of no signal, or of the one that the tests use.
fn set(with_signal: bool) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the call initialises the set.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: the set was initialised above.
    let mut set = unsafe { set.assume_init() };
    if with_signal {
        // SAFETY: `set` is valid for the call.
        unsafe { libc::sigaddset(&raw mut set, libc::SIGUSR1) };
    }
    set
}

fn block(set: &libc::sigset_t) {
    // SAFETY: `set` outlives the call, and a null old set is allowed.
    let ret = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, set, ptr::null_mut()) };
    assert_eq!(ret, 0);
}

fn signal(thread: libc::pthread_t) {
    // SAFETY: the thread exists until the test ends.
    assert_eq!(unsafe { libc::pthread_kill(thread, libc::SIGUSR1) }, 0);
}

/// Submits a request that waits in the kernel. Returns a function that ends it.
fn waiting(engine: &Engine) -> impl FnOnce() + use<> {
    let pair = pipe().unwrap();
    if engine.backend() == BackendKind::Uring {
        let pipe = engine.attach(pair.0).unwrap();
        engine.read(&pipe, vec![0; 1], 0).callback(|read, _| assert_eq!(read.unwrap(), 0)).unwrap();
        return Box::new(move || drop(pair.1)) as Box<dyn FnOnce()>;
    }
    // The open of a FIFO waits for the other end.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fifo");
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: `name` ends with a zero byte and outlives the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    let opened = |file: Result<File, _>, _| drop(file.unwrap());
    engine.open(&path, OpenOptions::read_only()).callback(opened).unwrap();
    Box::new(move || {
        std::fs::File::options().write(true).open(&path).unwrap();
        drop(folder);
    })
}

/// One test, because the handler and its counter belong to the process.
#[test]
fn inv20_a_signal_ends_an_interruptible_wait_and_no_other() {
    install();
    // SAFETY: the call has no condition.
    let me = unsafe { libc::pthread_self() };
    on_every_backend(|engine| {
        let kind = engine.backend();
        let end = waiting(engine);
        let interrupted = |mask: Option<&libc::sigset_t>| {
            let error = engine.wait_interruptible(PATIENCE, mask).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Interrupted, "{kind}");
        };
        block(&set(true));
        let (none, before) = (set(false), HANDLED.load(Ordering::SeqCst));
        for mode in [ReapMode::AfterSubmit, ReapMode::Poll] {
            engine.set_reap_mode(mode);
            // Pending before the wait, and not handled by waits without a mask.
            signal(me);
            engine.wait(Some(Duration::from_millis(1))).unwrap();
            engine.wait_interruptible(Some(Duration::from_millis(1)), None).unwrap();
            let handled = HANDLED.load(Ordering::SeqCst);
            interrupted(Some(&none));
            assert_eq!(HANDLED.load(Ordering::SeqCst), handled + 1);
            // It comes during the sleep.
            let sender = thread::spawn(move || {
                thread::sleep(Duration::from_millis(20));
                signal(me);
            });
            interrupted(Some(&none));
            sender.join().unwrap();
        }
        engine.set_reap_mode(ReapMode::AfterSubmit);
        assert_eq!(HANDLED.load(Ordering::SeqCst), before + 4);
        // The signal is blocked only outside of the wait, and the other waits go on.
        block(&none);
        let sender = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            signal(me);
        });
        let start = Instant::now();
        assert_eq!(engine.wait(Some(Duration::from_millis(60))).unwrap().delivered, 0);
        assert!(start.elapsed() >= Duration::from_millis(60));
        sender.join().unwrap();
        let sender = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            signal(me);
        });
        interrupted(None);
        sender.join().unwrap();
        // Completions end it as usual, and the time does, and an idle engine.
        let short = Some(Duration::from_millis(1));
        assert_eq!(engine.wait_interruptible(short, Some(&none)).unwrap().delivered, 0);
        end();
        assert_eq!(engine.wait_interruptible(PATIENCE, Some(&none)).unwrap().delivered, 1);
        assert!(engine.wait_interruptible(None, None).unwrap().is_idle());
    });
    a_pending_signal_is_handled_and_does_not_hold_completions_back(me);
    a_signal_ends_a_wait_that_continues_short_transfers(me);
    a_wait_for_other_threads_lasts_until_the_last_remote_leaves(me);
}

fn handled() -> usize {
    HANDLED.load(Ordering::SeqCst)
}

fn a_pending_signal_is_handled_and_does_not_hold_completions_back(me: libc::pthread_t) {
    let script = Script::new();
    let engine = Engine::builder().build_scripted(&script).unwrap();
    let nops: Vec<_> = (0..3).map(|_| engine.nop().submit().unwrap()).collect();
    let (none, before) = (set(false), handled());
    block(&set(true));
    for round in 1..=nops.len() {
        script.complete(1);
        signal(me);
        assert_eq!(engine.wait_interruptible(PATIENCE, Some(&none)).unwrap().delivered, 1);
        assert_eq!(handled(), before + round);
    }
    signal(me);
    let error = engine.wait_interruptible(PATIENCE, Some(&none)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted, "an idle engine handles it too");
    nops.into_iter().for_each(|nop| assert_eq!(nop.wait().0.unwrap(), 0));
    block(&none);
}

/// Sends the signal to a thread when it is woken.
struct SignalOnWake(libc::pthread_t);

impl Wake for SignalOnWake {
    fn wake(self: Arc<Self>) {
        signal(self.0);
    }
}

/// The device completes one byte of the read before each sleep, so no sleep handles a signal, and
/// each turn continues the read, so none delivers it.
fn a_signal_ends_a_wait_that_continues_short_transfers(me: libc::pthread_t) {
    const BYTES: usize = 1 << 16;
    let script = Script::new();
    let engine = Engine::builder().build_scripted(&script).unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(BYTES as u64).unwrap();
    let file = engine.attach(file).unwrap();
    (1..BYTES).for_each(|_| script.on_transfer(Transfer::Short(1)));
    let mut read = engine.read(&file, vec![1; BYTES], 0).submit().unwrap();
    let waker = Waker::from(Arc::new(SignalOnWake(me)));
    assert!(matches!(Pin::new(&mut read).poll(&mut Context::from_waker(&waker)), Poll::Pending));
    let read = read.deadline(Instant::now() + Duration::from_millis(1));
    let (none, before) = (set(false), handled());
    block(&set(true));
    let error = engine.wait_interruptible(PATIENCE, Some(&none)).expect_err("it missed the signal");
    assert_eq!((error.kind(), handled()), (ErrorKind::Interrupted, before + 1));
    block(&none);
    let (read, buf) = read.into_operation().expect("it has not completed").wait();
    assert_eq!((read.unwrap(), buf), (BYTES, vec![0; BYTES]));
}

fn a_wait_for_other_threads_lasts_until_the_last_remote_leaves(me: libc::pthread_t) {
    let engine = Engine::builder().build_scripted(&Script::new()).unwrap();
    let remote = engine.remote();
    let none = set(false);
    block(&set(true));
    let short = Duration::from_millis(5);
    let start = Instant::now();
    assert!(engine.wait_interruptible(Some(short), Some(&none)).unwrap().is_idle());
    assert!(start.elapsed() >= short, "it did not sleep");
    signal(me);
    let error = engine.wait_interruptible(None, Some(&none)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted);
    let sender = thread::spawn(move || {
        thread::sleep(short);
        remote.nop().submit().unwrap().wait().0.unwrap();
    });
    assert_eq!(engine.wait_interruptible(None, Some(&none)).unwrap().delivered, 1);
    assert!(engine.wait_interruptible(None, Some(&none)).unwrap().is_idle());
    sender.join().unwrap();
    block(&none);
}

/// Deadlines are due during an interruptible wait as well.
#[test]
fn inv20_deadlines_end_an_interruptible_wait() {
    on_every_backend(|engine| {
        let ends: Vec<_> = (0..8).map(|_| waiting(engine)).collect(); // fills the engine's depth
        let at = Instant::now() + Duration::from_millis(5);
        let late = engine.nop().cancel_at(at).submit().unwrap();
        assert_eq!(engine.wait_interruptible(PATIENCE, None).unwrap().delivered, 1);
        assert!(Instant::now() >= at);
        assert_eq!(late.wait().0.unwrap_err().errno(), libc::ETIMEDOUT);
        ends.into_iter().for_each(|end| end());
        engine.drain().unwrap();
    });
}
