//! A handle for each side of a queue: the last of a side closes it.

use std::fmt;
use std::ops::Deref;

use percpu::sync::atomic::{AtomicUsize, Ordering, fence};
use percpu::sync::{Arc, mutant};

use crate::core::{Bitmap, Levels};
use crate::queue::Queue;

/// The side that sends; clones are of the same side. When the last is dropped the queue closes: what is
/// in it can be received.
///
/// Dereferences to the [`Queue`].
pub struct Sender<T, L: Levels = Bitmap> {
    shared: Arc<Shared<T, L>>,
}

/// The side that receives; clones are of the same side. When the last is dropped the queue closes, and
/// its messages are dropped.
///
/// Dereferences to the [`Queue`].
pub struct Receiver<T, L: Levels = Bitmap> {
    shared: Arc<Shared<T, L>>,
}

struct Shared<T, L: Levels> {
    queue: Queue<T, L>,
    senders: AtomicUsize,
    receivers: AtomicUsize,
}

/// Both sides of a queue.
pub(crate) fn pair<T, L: Levels>(queue: Queue<T, L>) -> (Sender<T, L>, Receiver<T, L>) {
    let (senders, receivers) = (AtomicUsize::new(1), AtomicUsize::new(1));
    let shared = Arc::new(Shared { queue, senders, receivers });
    (Sender { shared: Arc::clone(&shared) }, Receiver { shared })
}

/// Counts a handle out; true if it was the last.
fn was_last(count: &AtomicUsize) -> bool {
    if mutant("handles-are-counted-in-two-steps") {
        // Ordering: Relaxed, both; that is not the bug.
        let handles = count.load(Ordering::Relaxed);
        count.store(handles - 1, Ordering::Relaxed);
        return handles == 1;
    }
    // Ordering: Release pairs with the fence of the last one; it carries what was done by this handle.
    let last = count.fetch_sub(1, Ordering::Release) == 1;
    if last {
        // Ordering: Acquire, of what the others did before they were dropped.
        fence(Ordering::Acquire);
    }
    last
}

macro_rules! side {
    ($name:ident, $count:ident) => {
        impl<T, L: Levels> Clone for $name<T, L> {
            fn clone(&self) -> Self {
                // Ordering: Relaxed; this handle keeps the count above 0.
                self.shared.$count.fetch_add(1, Ordering::Relaxed);
                Self { shared: Arc::clone(&self.shared) }
            }
        }

        impl<T, L: Levels> Deref for $name<T, L> {
            type Target = Queue<T, L>;

            #[inline]
            fn deref(&self) -> &Queue<T, L> {
                &self.shared.queue
            }
        }

        impl<T, L: Levels> fmt::Debug for $name<T, L> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_tuple(stringify!($name)).field(&self.shared.queue).finish()
            }
        }
    };
}

side!(Sender, senders);
side!(Receiver, receivers);

impl<T, L: Levels> Drop for Sender<T, L> {
    fn drop(&mut self) {
        if was_last(&self.shared.senders) {
            let _ = self.shared.queue.close(); // in a fork child nobody waits who could be told
        }
    }
}

impl<T, L: Levels> Drop for Receiver<T, L> {
    fn drop(&mut self) {
        if was_last(&self.shared.receivers) {
            if mutant("receiver-drains-before-it-closes") {
                drop(self.shared.queue.drain());
                let _ = self.shared.queue.close();
                return;
            }
            let _ = self.shared.queue.close(); // as above
            // One by one: neither a lock for long nor memory for all of them.
            while self.shared.queue.try_receive().is_ok() {}
        }
    }
}
