//! Drops of deep queues while other threads use them.
#![cfg(not(offlock_model))]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::thread;
use std::time::Instant;

use mq_rbtree::{Bitmap, Builder, Levels, PRIORITIES, RbTree, SendRefused, Sender};

use testkit::watchdog::watched;

const MESSAGES: u64 = 1_000_000;

/// What the messages of one queue have observed.
#[derive(Default)]
struct Seen {
    dropped: AtomicU64,
    /// Operations that another thread has done on the queue meanwhile.
    operations: AtomicU64,
    over: AtomicBool,
}

/// A message whose drop sometimes waits until the queue was used once more: under the lock it would
/// wait for ever. The messages of the thread that uses the queue contain `None` and do not wait.
struct Message(Option<Arc<Seen>>);

impl Drop for Message {
    fn drop(&mut self) {
        let Some(seen) = &self.0 else { return };
        let before = seen.dropped.fetch_add(1, Relaxed);
        if before % (MESSAGES / 10) == MESSAGES / 20 {
            let done = seen.operations.load(SeqCst);
            // Two operations: the second one began after this load.
            while seen.operations.load(SeqCst) < done + 2 {
                thread::yield_now();
            }
        }
    }
}

fn uses<L: Levels<Priority = u32>>(sender: &Sender<Message, L>, seen: &Seen) {
    while !seen.over.load(SeqCst) {
        let stats = sender.stats();
        assert_eq!(stats.sent, stats.received + stats.depth as u64);
        if let Err(refused) = sender.try_send(Message(None), 7) {
            assert!(matches!(refused.reason, SendRefused::Full | SendRefused::Closed));
        }
        assert!(sender.len() <= MESSAGES as usize);
        seen.operations.fetch_add(1, SeqCst);
    }
}

/// Drops a million messages, with the last receiver or in a drain.
fn drops<L: Levels<Priority = u32>>(by_drain: bool)
where
    Sender<Message, L>: Sync,
{
    let (sender, receiver) = Builder::<Message, L>::new(MESSAGES as usize).channel().unwrap();
    let seen = Arc::new(Seen::default());
    for n in 0..MESSAGES {
        let priority = (n * 7_919 % u64::from(PRIORITIES)) as u32;
        assert!(sender.try_send(Message(Some(Arc::clone(&seen))), priority).is_ok());
    }
    watched(
        || seen.dropped.load(Relaxed),
        || sender.stats().to_string(),
        || {
            thread::scope(|scope| {
                scope.spawn(|| uses(&sender, &seen));
                if by_drain {
                    let all = receiver.drain();
                    assert_eq!(all.len() as u64, MESSAGES);
                    assert!(all.is_sorted_by(|a, b| a.1 >= b.1));
                    drop(all);
                }
                drop(receiver);
                seen.over.store(true, SeqCst);
            });
        },
    );
    assert_eq!(seen.dropped.load(SeqCst), MESSAGES);
    assert_eq!((sender.is_closed(), sender.len()), (true, 0));
    sender.validate();
}

#[test]
#[ignore = "stress: a million messages at a time"]
fn stress_inv16_a_million_messages_are_dropped_while_others_use_the_queue() {
    let until = Instant::now() + testkit::stress::stress_time(5);
    let mut rounds = 0;
    while rounds == 0 || Instant::now() < until {
        let by_drain = rounds % 2 == 1;
        drops::<Bitmap>(by_drain);
        drops::<RbTree<u32>>(!by_drain);
        rounds += 1;
    }
    println!("{} queues of {MESSAGES} messages", 2 * rounds);
}
