//! Threads for what waits: a worker has none to spare.
//!
//! ```text
//!  worker ─► queue ─► hand: runs the job, which blocks ─► back ─► the worker, woken
//! ```
//!
//! One pool for all workers, started as it is needed, with a queue as each of them has before its places
//! ([`admission`](crate::admission)): syncs and small reads before large writes. No job waits for one that is still in the queue: what
//! a job holds it holds while it runs, and it has a thread then. So a few threads are enough for any number
//! of jobs, of which there are no more than the workers take requests.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Waker;

use aio_reap::AlignedBuf;
use percpu::AllocError;
use percpu::sync::{Condvar, Mutex};
use tracing::warn;

use crate::admission::{Admission, Class};
use crate::changes::{Job, Outcome};

/// Most threads. A guess: enough to keep a disk busy beside the workers' engines.
const MOST: usize = 8;

/// The threads, and what waits for one.
#[derive(Debug)]
pub(crate) struct Hands(Arc<Queue>);

struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    tasks: Admission<Task>,
    threads: usize,
    /// Threads that wait for a task.
    idle: usize,
    closed: bool,
}

/// A job, the buffer that it is about, and who wants to hear of it.
pub(crate) struct Task {
    pub(crate) job: Job,
    pub(crate) buf: Option<AlignedBuf>,
    /// The worker's number for it.
    pub(crate) key: usize,
    pub(crate) back: Arc<Back>,
}

/// A job that has ended.
pub(crate) struct Done {
    pub(crate) key: usize,
    pub(crate) result: io::Result<Outcome>,
    pub(crate) buf: Option<AlignedBuf>,
}

/// What comes back to one worker.
pub(crate) struct Back {
    done: Mutex<VecDeque<Done>>,
    waker: Waker,
}

impl Back {
    /// The waker is called, by any thread, when [`pop`](Self::pop) has something.
    pub(crate) fn new(waker: Waker) -> Self {
        Self { done: Mutex::new(VecDeque::new()), waker }
    }

    pub(crate) fn pop(&self) -> Option<Done> {
        self.done.lock().pop_front()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.done.lock().is_empty()
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").finish_non_exhaustive()
    }
}

impl Hands {
    /// For so many exports.
    pub(crate) fn new(exports: usize) -> Result<Self, AllocError> {
        let tasks = Admission::new(exports)?;
        let state = State { tasks, threads: 0, idle: 0, closed: false };
        Ok(Self(Arc::new(Queue { state: Mutex::new(state), changed: Condvar::new() })))
    }

    /// Has a thread run the job; the task comes back where there can be none.
    pub(crate) fn give(&self, export: usize, class: Class, task: Task) -> Result<(), Task> {
        let mut state = self.0.state.lock();
        if state.idle <= state.tasks.len() && state.threads < MOST {
            let queue = Arc::clone(&self.0);
            match std::thread::Builder::new().name("hand".into()).spawn(move || queue.work()) {
                Ok(_) => state.threads += 1,
                Err(error) if state.threads == 0 => {
                    warn!(%error, "no thread to do what waits");
                    return Err(task);
                }
                Err(_) => {} // those that there are take it in turn
            }
        }
        state.tasks.push(export, class, task)?;
        drop(state);
        self.0.changed.notify_one();
        Ok(())
    }
}

impl Drop for Hands {
    /// Nobody waits for the threads: this may be one of them, and each ends with what it has.
    fn drop(&mut self) {
        self.0.state.lock().closed = true;
        self.0.changed.notify_all();
    }
}

impl Queue {
    fn work(&self) {
        while let Some(task) = self.next() {
            task.run();
        }
    }

    fn next(&self) -> Option<Task> {
        let mut state = self.state.lock();
        loop {
            if let Some(task) = state.tasks.pop() {
                return Some(task);
            }
            if state.closed {
                return None;
            }
            state.idle += 1;
            self.changed.wait(&mut state);
            state.idle -= 1;
        }
    }
}

impl Task {
    fn run(self) {
        let Self { job, mut buf, key, back } = self;
        let bytes = buf.as_deref_mut().unwrap_or_default();
        let result = catch_unwind(AssertUnwindSafe(|| job.run(bytes)))
            .unwrap_or_else(|_| Err(io::Error::from_raw_os_error(libc::EIO)));
        drop(job); // before anybody hears of it: nothing of the image is here at the end
        back.done.lock().push_back(Done { key, result, buf });
        back.waker.wake_by_ref();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::task::Wake;
    use std::time::Duration;

    use bufcache::{BlockDevice, Fault, FaultDevice, MemoryDevice, Operation};

    use super::*;
    use crate::blocks::{BLOCK, Blocks};
    use crate::changes::Work;

    struct Bell(mpsc::Sender<()>);

    impl Wake for Bell {
        fn wake(self: Arc<Self>) {
            let _ = self.0.send(()); // the last of them nobody waits for
        }
    }

    /// Long jobs in every hand, and more of them in the queue: a sync that comes last does not end last, and
    /// each comes back once.
    #[test]
    fn what_is_urgent_overtakes_what_is_not() {
        const LONG: usize = 60;
        let disk = Arc::new(FaultDevice::new(MemoryDevice::new(vec![0; LONG * BLOCK])));
        disk.inject(Operation::Discard, .., Fault::Delay(Duration::from_millis(20)));
        let raw: Arc<dyn BlockDevice> = disk;
        let file = tempfile::tempfile().unwrap();
        let blocks = Blocks::on(1 << 20, (&[file], 1), |_| Ok(Arc::clone(&raw))).unwrap();
        let image = blocks.image(0).unwrap();
        let (sender, rung) = mpsc::channel();
        let back = Arc::new(Back::new(Arc::new(Bell(sender)).into()));
        let give = |key: usize, class, work| {
            let image = Arc::clone(image);
            let offset = (key % LONG * BLOCK) as u64;
            let job = Job { image, work, offset, len: BLOCK as u32 };
            let task = Task { job, buf: None, key, back: Arc::clone(&back) };
            assert!(blocks.give(0, class, task).is_ok());
        };
        for key in 0..LONG {
            give(key, Class::LargeWrite, Work::Trim { fua: false });
        }
        give(LONG, Class::Sync, Work::Flush);
        let mut order = Vec::new();
        while order.len() <= LONG {
            rung.recv().unwrap();
            while let Some(done) = back.pop() {
                assert_eq!(done.result.unwrap(), Outcome::Done);
                order.push(done.key);
            }
        }
        let sync = order.iter().position(|&key| key == LONG).unwrap();
        assert!(sync < LONG - 2 * MOST, "{order:?}");
        order.sort_unstable();
        assert!(order.into_iter().eq(0..=LONG));
    }
}
