//! Signals that end interruptible waits.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc;
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, SystemTime};

use mq_rbtree::{Queue, ReceiveError, SendRefused, Wait};

/// Its handler has no `SA_RESTART`.
const ENDS: libc::c_int = libc::SIGUSR1;
/// Its handler has.
const RESTARTS: libc::c_int = libc::SIGUSR2;

static HANDLED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn handle(_: libc::c_int) {
    HANDLED.fetch_add(1, SeqCst);
}

fn install_handlers() {
    for (signal, flags) in [(ENDS, 0), (RESTARTS, libc::SA_RESTART)] {
        // SAFETY: all zero is a valid `sigaction`, with an empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handle as *const () as usize;
        action.sa_flags = flags;
        // SAFETY: the handler adds to an atomic and does nothing else.
        assert_eq!(unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) }, 0);
    }
}

/// A thread, until whose end this one may send it signals.
struct Target<'s, R>(ScopedJoinHandle<'s, R>, libc::pthread_t);

impl<'s, R: Send + 's> Target<'s, R> {
    fn spawn(scope: &'s Scope<'s, '_>, f: impl FnOnce() -> R + Send + 's) -> Self {
        let (tell, told) = mpsc::channel();
        let thread = scope.spawn(move || {
            // SAFETY: has no preconditions.
            tell.send(unsafe { libc::pthread_self() }).unwrap();
            f()
        });
        Self(thread, told.recv().unwrap())
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: the handle of the thread keeps its id valid, also when it has ended (`ESRCH`).
        assert!([0, libc::ESRCH].contains(&unsafe { libc::pthread_kill(self.1, signal) }));
        thread::sleep(Duration::from_micros(300));
    }

    /// Sends signals until the thread ends: one may come before it sleeps.
    fn interrupt(self, signal: libc::c_int) -> R {
        while !self.0.is_finished() {
            self.signal(signal);
        }
        self.0.join().unwrap()
    }
}

#[test]
fn a_signal_ends_interruptible_waits() {
    install_handlers();
    let long = || Wait::at_most(Duration::from_secs(3_600));
    for spin in [false, true] {
        let empty: Queue<u32> = Queue::builder(1).spin(spin).build().unwrap();
        let full: Queue<u32> = Queue::builder(1).spin(spin).build().unwrap();
        full.send(1, 1).unwrap();
        // A timed sleep does not restart, whatever the handler's flags.
        let realtime = Wait::until(SystemTime::now() + Duration::from_secs(3_600));
        let timed = [(long(), ENDS), (long(), RESTARTS), (realtime, ENDS)];
        for (wait, signal) in timed.into_iter().chain([(Wait::FOREVER, ENDS)]) {
            let wait = wait.interruptible();
            thread::scope(|scope| {
                let receives = Target::spawn(scope, || empty.receive_with(wait));
                assert_eq!(receives.interrupt(signal), Err(ReceiveError::Interrupted));
                let guards = Target::spawn(scope, || empty.receive_guard_with(wait).err());
                assert_eq!(guards.interrupt(signal), Some(ReceiveError::Interrupted));
                let sends = Target::spawn(scope, || full.send_with(7, 7, wait).unwrap_err());
                let refused = sends.interrupt(signal);
                assert_eq!((refused.value, refused.reason), (7, SendRefused::Interrupted));
                let batch = || full.send_batch(&mut [(7, 7)].into(), wait).unwrap_err().reason;
                assert_eq!(Target::spawn(scope, batch).interrupt(signal), SendRefused::Interrupted);
            });
        }
        for queue in [empty, full] {
            queue.validate();
            assert_eq!((queue.stats().waiting, queue.stats().timeouts), ((0, 0), 0));
        }
    }
}

#[test]
fn a_signal_does_not_end_other_waits() {
    install_handlers();
    let queue: Queue<u32> = Queue::new(1).unwrap();
    let late = Wait::at_most(Duration::from_secs(3_600));
    let restarted = Wait::FOREVER.interruptible();
    for (wait, signal) in [(Wait::FOREVER, ENDS), (late, ENDS), (restarted, RESTARTS)] {
        let before = HANDLED.load(SeqCst);
        thread::scope(|scope| {
            let receives = Target::spawn(scope, || queue.receive_with(wait));
            let guards =
                Target::spawn(scope, || queue.receive_guard_with(wait).map(|g| g.accept()));
            for _ in 0..50 {
                receives.signal(signal);
                guards.signal(signal);
            }
            for n in 0..2 {
                queue.send(n, 7).unwrap();
            }
            let mut got = [receives.0.join().unwrap(), guards.0.join().unwrap()];
            got.sort_by_key(|got| got.unwrap());
            assert_eq!(got, [Ok((0, 7)), Ok((1, 7))]);
        });
        assert!(HANDLED.load(SeqCst) > before);
    }
}

/// Signals rain on a sender and a receiver: each message is received once, in its order.
#[test]
fn inv17_interrupted_waits_lose_no_message() {
    install_handlers();
    const MESSAGES: u32 = 2_000;
    let queue: Queue<u32> = Queue::builder(2).spin(false).build().unwrap();
    let (wait, interrupts) = (Wait::FOREVER.interruptible(), AtomicUsize::new(0));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let sender = Target::spawn(scope, || {
            for n in 0..MESSAGES {
                let mut message = n;
                while let Err(refused) = queue.send_with(message, 7, wait) {
                    assert_eq!(refused.reason, SendRefused::Interrupted);
                    interrupts.fetch_add(1, SeqCst);
                    message = refused.value;
                }
                if n % 64 == 0 {
                    thread::sleep(Duration::from_millis(1)); // the receiver sleeps meanwhile
                }
            }
        });
        let receiver = Target::spawn(scope, || {
            for n in 0..MESSAGES {
                let got = loop {
                    match queue.receive_with(wait) {
                        Err(ReceiveError::Interrupted) => interrupts.fetch_add(1, SeqCst),
                        got => break got,
                    };
                };
                assert_eq!(got, Ok((n, 7)));
                if n % 64 == 32 {
                    thread::sleep(Duration::from_millis(1)); // so does the sender
                }
            }
            done.store(true, SeqCst);
        });
        while !done.load(SeqCst) {
            sender.signal(ENDS);
            receiver.signal(ENDS);
        }
    });
    queue.validate();
    assert!(interrupts.into_inner() > 0);
    assert!(queue.is_empty());
}
