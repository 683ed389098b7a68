//! The kernel's queue through this crate's interface, and the limits of the system.

#![cfg(all(feature = "kernel", not(any(offlock_loom, offlock_shuttle))))]

#[path = "common/asleep.rs"]
mod asleep;
#[path = "common/namespace.rs"]
mod namespace;

use std::fs;
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::thread::JoinHandleExt;
use std::process::Command;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use asleep::asleep;
use mq_rbtree::{
    Attributes, Callback, KernelQueue, MessageQueue, NotifyRefused, OpenError, ReceiveError,
    SendRefused, Wait,
};
use namespace::{is_child, run_in_one, say_refused};

/// Longer than any step here takes.
const LONG: Duration = Duration::from_secs(20);
/// Long enough for an unexpected event to occur.
const MOMENT: Duration = Duration::from_millis(50);

fn queue(max_messages: usize) -> KernelQueue {
    KernelQueue::new(Attributes { max_messages, max_message_bytes: 8 }).unwrap()
}

fn send(queue: &KernelQueue, message: &str, priority: u32) {
    queue.send_with(message.into(), priority, Wait::NO).unwrap();
}

fn receive(queue: &KernelQueue) -> (String, u32) {
    let (message, priority) = queue.receive_with(Wait::NO).unwrap();
    (String::from_utf8(message).unwrap(), priority)
}

#[test]
fn the_oldest_of_the_highest_priority_comes_first() {
    let queue = queue(4);
    let asked = Attributes { max_messages: 4, max_message_bytes: 8 };
    assert_eq!(
        (queue.attributes(), queue.len().unwrap(), queue.is_empty().unwrap()),
        (asked, 0, true)
    );
    for (message, priority) in [("c", 1), ("a", 32_767), ("d", 1), ("b", 2)] {
        send(&queue, message, priority);
    }
    assert_eq!((queue.len().unwrap(), queue.is_empty().unwrap()), (4, false));
    for (message, priority) in [("a", 32_767), ("b", 2), ("c", 1), ("d", 1)] {
        assert_eq!(receive(&queue), (message.to_owned(), priority));
    }
}

#[test]
fn a_refused_message_comes_back_with_the_reason() {
    let queue = queue(1);
    let refused = |message: &str, priority, wait| {
        let error = queue.send_with(message.into(), priority, wait).unwrap_err();
        assert_eq!(error.value, message.as_bytes());
        error.reason
    };
    let past = Wait::until(SystemTime::UNIX_EPOCH - LONG);
    let short = Wait::at_most(Duration::from_millis(5));
    let too_long = SendRefused::TooLong { limit: 8 };
    let bad_priority = SendRefused::BadPriority { priority: 32_768 };

    assert_eq!(queue.receive_with(Wait::NO), Err(ReceiveError::Empty));
    assert_eq!(queue.receive_with(past), Err(ReceiveError::Timeout));
    assert_eq!(queue.receive_with(short), Err(ReceiveError::Timeout));
    assert_eq!(refused("m", 32_768, Wait::FOREVER), bad_priority);
    assert_eq!(refused("too long!", 0, Wait::FOREVER), too_long);
    assert_eq!(refused("too long!", 32_768, Wait::FOREVER), bad_priority);

    queue.send_with(b"there is".to_vec(), 0, past).unwrap(); // does not wait
    assert_eq!(refused("m", 0, Wait::NO), SendRefused::Full);
    assert_eq!(refused("m", 0, past), SendRefused::Timeout);
    assert_eq!(refused("m", 0, short), SendRefused::Timeout);
    assert_eq!(refused("too long!", 0, past), too_long);
    let bad_priority = SendRefused::BadPriority { priority: u32::MAX };
    assert_eq!(refused("m", u32::MAX, past), bad_priority);
    assert_eq!(queue.receive_with(past).unwrap(), (b"there is".to_vec(), 0));
}

#[test]
fn a_deadline_of_either_clock_is_waited_for() {
    let queue = queue(1);
    for realtime in [false, true] {
        let start = Instant::now();
        let wait = if realtime {
            Wait::until(SystemTime::now() + MOMENT)
        } else {
            Wait::until(start + MOMENT)
        };
        assert_eq!(queue.receive_with(wait), Err(ReceiveError::Timeout));
        // The clocks differ by some parts in a million.
        assert!(start.elapsed() >= MOMENT - MOMENT / 100 && start.elapsed() < LONG);
    }
    assert_eq!(queue.receive_with(Wait::at_most(Duration::ZERO)), Err(ReceiveError::Timeout));
}

#[test]
fn waiting_threads_are_served() {
    let queue = queue(1);
    for wait in [Wait::FOREVER, Wait::at_most(Duration::MAX), Wait::until(SystemTime::now() + LONG)]
    {
        thread::scope(|scope| {
            let receiver = asleep(scope, || queue.receive_with(wait).unwrap());
            send(&queue, "1", 1);
            assert_eq!(receiver.join().unwrap(), (b"1".to_vec(), 1));

            send(&queue, "2", 2);
            let sender = asleep(scope, || queue.send_with(b"3".to_vec(), 3, wait).unwrap());
            assert_eq!(receive(&queue), ("2".to_owned(), 2));
            sender.join().unwrap();
            assert_eq!(receive(&queue), ("3".to_owned(), 3));
        });
    }
}

extern "C" fn do_nothing(_: libc::c_int) {}

/// Without `SA_RESTART` this crate repeats the call, unless the wait is interruptible; with it the
/// kernel does, also with a deadline.
#[test]
fn a_signal_does_not_end_a_wait() {
    for (signal, flags) in [(libc::SIGUSR1, 0), (libc::SIGUSR2, libc::SA_RESTART)] {
        // SAFETY: all zero is a valid `sigaction`.
        let mut action: libc::sigaction = unsafe { mem::zeroed() };
        action.sa_sigaction = do_nothing as extern "C" fn(libc::c_int) as usize;
        action.sa_flags = flags;
        // SAFETY: the handler does nothing, and no other test uses the signals.
        let rc = unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) };
        assert_eq!(rc, 0);

        let waiter = thread::spawn(move || {
            let wait = || match Wait::at_most(4 * MOMENT) {
                wait if flags == libc::SA_RESTART => wait.interruptible(),
                wait => wait,
            };
            let (queue, start) = (queue(1), Instant::now());
            assert_eq!(queue.receive_with(wait()), Err(ReceiveError::Timeout));
            send(&queue, "full", 0);
            let refused = queue.send_with(b"m".to_vec(), 0, wait()).unwrap_err();
            assert_eq!((refused.value, refused.reason), (b"m".to_vec(), SendRefused::Timeout));
            start.elapsed()
        });
        while !waiter.is_finished() {
            thread::sleep(MOMENT / 5);
            // SAFETY: the thread was not joined.
            unsafe { libc::pthread_kill(waiter.as_pthread_t(), signal) };
        }
        assert!(waiter.join().unwrap() >= 8 * MOMENT);
    }
}

/// Returns a callback, and a receiver that shows whether it was called (`Ok`) or dropped uncalled
/// (`Disconnected`).
fn callback() -> (Callback, mpsc::Receiver<()>) {
    let (sender, receiver) = mpsc::channel();
    (Box::new(move || sender.send(()).unwrap()), receiver)
}

const DROPPED: Result<(), RecvTimeoutError> = Err(RecvTimeoutError::Disconnected);
const NOT_YET: Result<(), RecvTimeoutError> = Err(RecvTimeoutError::Timeout);

#[test]
fn a_notification_comes_once_for_the_first_message() {
    let queue = queue(2);
    send(&queue, "before", 0);
    let (first, called) = callback();
    queue.notify(first).unwrap();
    send(&queue, "more", 0); // the queue was not empty
    assert_eq!(called.recv_timeout(MOMENT), NOT_YET);
    receive(&queue);
    receive(&queue);

    let (second, unused) = callback();
    let busy = queue.notify(second).unwrap_err();
    assert_eq!((busy.reason, busy.errno()), (NotifyRefused::Busy, libc::EBUSY));
    assert_eq!(unused.recv_timeout(MOMENT), NOT_YET, "the callback came back");

    send(&queue, "now", 0);
    assert_eq!(called.recv_timeout(LONG), Ok(()));
    assert_eq!(called.recv_timeout(LONG), DROPPED, "once");
    receive(&queue);
    queue.notify(busy.callback).unwrap();
    send(&queue, "again", 0);
    assert_eq!(unused.recv_timeout(LONG), Ok(()));
}

#[test]
fn a_registration_ends_by_cancel_and_with_the_queue() {
    let queue = queue(1);
    queue.cancel_notify(); // nothing is registered
    let (first, called) = callback();
    queue.notify(first).unwrap();
    queue.cancel_notify();
    assert_eq!(called.recv_timeout(LONG), DROPPED);
    let (second, called) = callback();
    queue.notify(second).unwrap(); // a new registration is possible
    drop(queue);
    assert_eq!(called.recv_timeout(LONG), DROPPED, "its thread has ended, too");
}

#[test]
fn a_waiting_receiver_comes_before_a_registration() {
    let queue = queue(1);
    let (first, called) = callback();
    queue.notify(first).unwrap();
    thread::scope(|scope| {
        let receiver = asleep(scope, || queue.receive_with(Wait::FOREVER).unwrap());
        send(&queue, "m", 0);
        receiver.join().unwrap();
    });
    assert_eq!(called.recv_timeout(MOMENT), NOT_YET);
    send(&queue, "n", 0);
    assert_eq!(called.recv_timeout(LONG), Ok(()));
}

#[test]
fn a_name_is_of_one_queue_until_it_is_unlinked() {
    let name = format!("/mq-rbtree-test.{}", std::process::id());
    let attributes = Attributes { max_messages: 2, max_message_bytes: 8 };
    assert_eq!(KernelQueue::open(&name).unwrap_err(), OpenError::NotFound);
    let maker = KernelQueue::create(&name, attributes).unwrap();
    let exists = KernelQueue::create(&name, attributes).unwrap_err();
    assert_eq!((exists, exists.errno()), (OpenError::Exists, libc::EEXIST));

    let user = KernelQueue::open(&name).unwrap();
    assert_eq!(user.attributes(), attributes);
    send(&maker, "m", 7);
    KernelQueue::unlink(&name).unwrap();
    assert_eq!(KernelQueue::unlink(&name).unwrap_err(), OpenError::NotFound);
    drop(maker);
    assert_eq!(receive(&user), ("m".to_owned(), 7));

    let long = format!("/{}", "n".repeat(256));
    for bad in ["", "/", "name", "/a/b", "//a", "/.", "/..", "/a\0b", &long] {
        assert_eq!(KernelQueue::create(bad, attributes).unwrap_err(), OpenError::BadName, "{bad}");
        assert_eq!(KernelQueue::open(bad).unwrap_err(), OpenError::BadName, "{bad}");
        assert_eq!(KernelQueue::unlink(bad).unwrap_err(), OpenError::BadName, "{bad}");
    }
    KernelQueue::create(&long[..256], attributes).unwrap();
    KernelQueue::unlink(&long[..256]).unwrap();
}

#[test]
fn a_queue_can_be_polled() {
    let queue = queue(1);
    let ready = || {
        let events = libc::POLLIN | libc::POLLOUT;
        let mut polled = libc::pollfd { fd: queue.as_fd().as_raw_fd(), events, revents: 0 };
        // SAFETY: the pointer is to one structure of this frame.
        assert!(unsafe { libc::poll(&mut polled, 1, 0) } >= 0);
        polled.revents
    };
    assert_eq!(ready(), libc::POLLOUT);
    send(&queue, "m", 0);
    assert_eq!(ready(), libc::POLLIN);
}

/// The umask takes nothing from the mode that a queue needs: its maker opens it twice.
#[test]
fn a_queue_is_made_under_any_umask() {
    let this = std::env::current_exe().unwrap();
    let args = ["child_under_a_umask", "--exact", "--ignored", "--nocapture"];
    let output = Command::new(this).args(args).env("OFFLOCK_UMASK", "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{output:?}");
}

#[test]
#[ignore = "a child of the test above"]
fn child_under_a_umask() {
    if std::env::var_os("OFFLOCK_UMASK").is_none() {
        return;
    }
    // SAFETY: has no preconditions.
    if unsafe { libc::geteuid() } == 0 {
        // Root may open any queue.
        // SAFETY: has no preconditions.
        assert_eq!(unsafe { libc::setuid(65_534) }, 0);
    }
    let name = format!("/mq-rbtree-umask.{}", std::process::id());
    for umask in [0o777, 0o277, 0o477, 0] {
        // SAFETY: has no preconditions.
        unsafe { libc::umask(umask) };
        send(&queue(1), "m", 1);
        let attributes = Attributes { max_messages: 1, max_message_bytes: 8 };
        let made = KernelQueue::create(&name, attributes);
        KernelQueue::unlink(&name).unwrap();
        send(&made.unwrap(), "m", 1);
    }
}

#[test]
fn a_limit_is_named_with_its_value_and_the_way_to_raise_it() {
    if let Err(why) = run_in_one("child_at_the_limits", true) {
        say_refused(&why);
    }
}

#[test]
#[ignore = "a child of the test above"]
fn child_at_the_limits() {
    if !is_child("child_at_the_limits") {
        return;
    }
    let setting = |name: &str| -> usize {
        let text = fs::read_to_string(format!("/proc/sys/fs/mqueue/{name}")).unwrap();
        text.trim().parse().unwrap()
    };
    let (msg_max, msgsize_max) = (setting("msg_max"), setting("msgsize_max"));
    let refused = |max_messages, max_message_bytes| {
        let attributes = Attributes { max_messages, max_message_bytes };
        let error = KernelQueue::new(attributes).unwrap_err();
        let errno = io::Error::from(error).raw_os_error().unwrap();
        assert_eq!(errno, error.errno());
        (error, errno)
    };
    let names = |error: OpenError, words: &[&str]| {
        let text = error.to_string();
        println!("{text}");
        words.iter().for_each(|word| assert!(text.contains(word), "{word} in: {text}"));
    };

    assert_eq!(refused(0, 1), (OpenError::NoRoom, libc::EINVAL));
    assert_eq!(refused(1, 0), (OpenError::NoRoom, libc::EINVAL));

    let (error, errno) = refused(msg_max + 1, 1);
    let (asked, limit) = (msg_max as u64 + 1, msg_max as u64);
    assert_eq!((error, errno), (OpenError::TooManyMessages { asked, limit }, libc::EINVAL));
    names(error, &["fs/mqueue/msg_max is", &format!("sysctl fs.mqueue.msg_max={}", msg_max + 1)]);

    let (error, errno) = refused(1, msgsize_max + 1);
    let (asked, limit) = (msgsize_max as u64 + 1, msgsize_max as u64);
    assert_eq!((error, errno), (OpenError::MessageTooLong { asked, limit }, libc::EINVAL));
    names(error, &["msgsize_max is", &format!("sysctl fs.mqueue.msgsize_max={asked}")]);

    let (error, _) = refused(65_537, 1);
    names(error, &["65537", "65536", "no setting"]);
    let (error, _) = refused(usize::MAX, usize::MAX);
    names(error, &["no setting"]);
    let (error, _) = refused(1, (16 << 20) + 1);
    names(error, &["16777216", "no setting"]);

    the_users_bytes(msg_max);
    the_descriptors();
    the_number_of_queues();
}

/// The kernel charges exactly the bytes that the error names.
fn the_users_bytes(max_messages: usize) {
    let attributes = Attributes { max_messages, max_message_bytes: 64 };
    let charge = max_messages as u64 * (64 + 48 + 48);
    set_limit(libc::RLIMIT_MSGQUEUE as i32, charge);
    drop(KernelQueue::new(attributes).unwrap());
    set_limit(libc::RLIMIT_MSGQUEUE as i32, charge - 1);
    let error = KernelQueue::new(attributes).unwrap_err();
    println!("{error}");
    assert_eq!(error, OpenError::TooManyBytes { asked: charge, limit: charge - 1 });
    assert_eq!(error.errno(), libc::EMFILE);
    let text = error.to_string();
    assert!(text.contains("RLIMIT_MSGQUEUE is") && text.contains("ulimit -q"), "{text}");
}

/// Fails with room for no descriptor and for one of two, and leaves no name behind.
fn the_descriptors() {
    const NAME: &str = "/descriptors";
    let attributes = Attributes { max_messages: 1, max_message_bytes: 1 };
    let lowest = {
        // SAFETY: `eventfd` takes two integers.
        let fd = unsafe { libc::eventfd(0, 0) };
        assert!(fd >= 0);
        // SAFETY: the descriptor was just opened, and nothing else owns it.
        unsafe { OwnedFd::from_raw_fd(fd) }.as_raw_fd() as u64
    };
    let before = set_limit(libc::RLIMIT_NOFILE as i32, lowest);
    for room in [0, 1] {
        set_limit(libc::RLIMIT_NOFILE as i32, lowest + room);
        let error = KernelQueue::create(NAME, attributes).unwrap_err();
        println!("{error}");
        assert_eq!(error, OpenError::TooManyDescriptors { limit: lowest + room });
        assert_eq!(error.errno(), libc::EMFILE);
    }
    set_limit(libc::RLIMIT_NOFILE as i32, before);
    assert_eq!(KernelQueue::open(NAME).unwrap_err(), OpenError::NotFound);
}

fn the_number_of_queues() {
    if let Err(error) = fs::write("/proc/sys/fs/mqueue/queues_max", "1") {
        // Older kernels allow this only to the root of the system.
        return say_refused(&format!("queues_max: {error}"));
    }
    let attributes = Attributes { max_messages: 1, max_message_bytes: 1 };
    let _first = KernelQueue::new(attributes).unwrap();
    let error = KernelQueue::new(attributes).unwrap_err();
    println!("{error}");
    assert_eq!(error, OpenError::TooManyQueues { limit: 1 });
    assert_eq!(error.errno(), libc::ENOSPC);
}

/// Sets the soft limit; returns the previous one.
fn set_limit(resource: i32, value: u64) -> u64 {
    // SAFETY: all zero is a valid `rlimit`.
    let mut limit: libc::rlimit = unsafe { mem::zeroed() };
    // SAFETY: `getrlimit` writes to a structure of this frame.
    assert_eq!(unsafe { libc::getrlimit(resource as _, &mut limit) }, 0);
    let before = mem::replace(&mut limit.rlim_cur, value);
    // SAFETY: `setrlimit` reads a structure of this frame.
    assert_eq!(unsafe { libc::setrlimit(resource as _, &limit) }, 0);
    before
}
