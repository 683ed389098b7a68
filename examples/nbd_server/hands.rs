//! Threads for what waits: a worker has none to spare.
//!
//! ```text
//!  worker ─► queue ─► hand: runs the job, which blocks ─► back ─► the worker, woken
//! ```
//!
//! One pool for all workers, started as it is needed, with a queue as each of them has before its places
//! ([`admission`](crate::admission)): syncs and small reads before large writes. No job waits for one that
//! is still in the queue: what a job holds it holds while it runs, and it has a thread then. So a few threads
//! are enough for any number of jobs, of which there are no more than the workers take requests.
//!
//! A device that hangs keeps the threads that work on it, so an image has no more of them than it leaves to
//! others: one alone half, the next half of the rest.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Waker;

use aio_reap::AlignedBuf;
use percpu::AllocError;
use percpu::sync::{Condvar, Mutex, spawn};
use tracing::warn;

use crate::admission::{Admission, Class, WaitStats};
use crate::changes::{self, Outcome};
use crate::places::Places;
use crate::{extents, idle};

/// Most threads. A guess: half of them keep a disk busy beside the workers' engines.
pub(crate) const MOST: usize = 16;
/// An image's [share](crate::places) of them: half, and half of what is left.
const SHARE: usize = 1;

/// The threads, and what waits for one.
#[derive(Debug)]
pub(crate) struct Hands(Arc<Queue>);

struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// By file.
    tasks: Admission<Task>,
    /// Threads that work, by file.
    places: Places,
    threads: usize,
    /// Threads that wait for a task.
    idle: usize,
    closed: bool,
}

/// What a thread is to do.
#[derive(Debug)]
pub(crate) enum Job {
    Image(changes::Job),
    Map(extents::Job),
    LetGo(idle::Job),
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
    /// With room for so many jobs. The waker is called, by any thread, when [`pop`](Self::pop) has something.
    pub(crate) fn new(jobs: usize, waker: Waker) -> Self {
        Self { done: Mutex::new(VecDeque::with_capacity(jobs)), waker }
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
    /// For so many files.
    pub(crate) fn new(files: usize) -> Result<Self, AllocError> {
        let (tasks, places) = (Admission::new(files)?, Places::new(MOST, SHARE, files));
        let state = State { tasks, places, threads: 0, idle: 0, closed: false };
        Ok(Self(Arc::new(Queue { state: Mutex::new(state), changed: Condvar::new() })))
    }

    /// Has a thread run the job, which is about that file; the task comes back where there can be none.
    pub(crate) fn give(&self, file: usize, class: Class, task: Task) -> Result<(), Task> {
        let mut state = self.0.state.lock();
        if state.threads == 0 {
            if let Err(error) = Queue::hire(&self.0, &mut state) {
                warn!(%error, "no thread to do what waits");
                return Err(task);
            }
        }
        state.tasks.push(file, class, task)?;
        Queue::call(&self.0, &mut state);
        Ok(())
    }
}

/// What the threads do.
#[derive(Debug)]
pub(crate) struct HandStats {
    pub(crate) busy: usize,
    pub(crate) waits: WaitStats,
    /// Files that threads work on, and how many.
    pub(crate) held: Vec<(usize, usize)>,
}

impl Hands {
    pub(crate) fn stats(&self) -> HandStats {
        let state = self.0.state.lock();
        let State { tasks, places, .. } = &*state;
        HandStats { busy: places.taken(), waits: tasks.stats(), held: places.held().collect() }
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
    fn hire(this: &Arc<Self>, state: &mut State) -> io::Result<()> {
        let queue = Arc::clone(this);
        spawn("hand".into(), move || queue.work())?;
        state.threads += 1;
        Ok(())
    }

    /// Has a thread come for what may be done now, if there is such. It calls the next one.
    fn call(this: &Arc<Self>, state: &mut State) {
        if !state.tasks.any(|file| state.places.may(file)) {
            return;
        }
        if state.idle > 0 {
            this.changed.notify_one();
        } else if state.threads < MOST {
            let _ = Self::hire(this, state); // else those that there are take it in turn
        }
    }

    fn work(self: Arc<Self>) {
        while let Some((file, task)) = self.next() {
            task.run();
            self.state.lock().places.leave(file);
        }
    }

    fn next(self: &Arc<Self>) -> Option<(usize, Task)> {
        let mut guard = self.state.lock();
        loop {
            let state = &mut *guard;
            let State { tasks, places, .. } = state;
            if let Some((file, task)) = tasks.pop_if(|file| places.may(file)) {
                places.take(file);
                Self::call(self, state);
                return Some((file, task));
            }
            if state.closed {
                return None; // who works does what is left
            }
            state.idle += 1;
            self.changed.wait(&mut guard);
            guard.idle -= 1;
        }
    }
}

impl Task {
    fn run(self) {
        let Self { job, mut buf, key, back } = self;
        let run = || match &job {
            Job::Image(job) => job.run(buf.as_deref_mut().unwrap_or_default()),
            Job::Map(job) => job.run(buf.as_mut()),
            Job::LetGo(job) => job.run(),
        };
        let result = catch_unwind(AssertUnwindSafe(run))
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

    use bufcache::{BlockDevice, MemoryDevice};

    use super::*;
    use crate::blocks::{BLOCK, Blocks};
    use crate::changes::Work;

    struct Bell(mpsc::Sender<()>);

    impl Wake for Bell {
        fn wake(self: Arc<Self>) {
            let _ = self.0.send(()); // the last of them nobody waits for
        }
    }

    /// A disk whose discards of a block wait until it is opened.
    struct Gate {
        disk: MemoryDevice,
        open: Mutex<Vec<bool>>,
        changed: Condvar,
        /// Blocks whose discards have come.
        come: mpsc::Sender<usize>,
    }

    impl Gate {
        fn new(blocks: usize, come: mpsc::Sender<usize>) -> Arc<Self> {
            let disk = MemoryDevice::new(vec![0; blocks * BLOCK]);
            let open = Mutex::new(vec![false; blocks]);
            Arc::new(Self { disk, open, changed: Condvar::new(), come })
        }

        fn open(&self, block: usize) {
            self.open.lock()[block] = true;
            self.changed.notify_all();
        }
    }

    impl BlockDevice for Gate {
        fn len(&self) -> u64 {
            self.disk.len()
        }

        fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
            self.disk.read(offset, buf)
        }

        fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
            let block = offset as usize / BLOCK;
            let _ = self.come.send(block);
            let mut open = self.open.lock();
            while !open[block] {
                self.changed.wait(&mut open);
            }
            drop(open);
            self.disk.discard(offset, len)
        }
    }

    /// One after the other hangs, each with more jobs than there are threads; the last is served all the same,
    /// and the others once they go on.
    #[test]
    fn images_that_hang_leave_a_hand_to_another() {
        const JOBS: usize = 2 * MOST;
        const HUNG: usize = 4;
        let (come, discards) = mpsc::channel();
        let gates: Vec<_> = (0..=HUNG).map(|_| Gate::new(JOBS, come.clone())).collect();
        let open_all = |gate: &Gate| (0..JOBS).for_each(|block| gate.open(block));
        open_all(&gates[HUNG]);
        let files: Vec<_> = gates.iter().map(|_| tempfile::tempfile().unwrap()).collect();
        let next = std::cell::Cell::new(0);
        let open = |_: &std::fs::File| -> io::Result<Arc<dyn BlockDevice>> {
            Ok(Arc::clone(&gates[next.replace(next.get() + 1)]) as _)
        };
        let blocks = Blocks::on(1 << 20, (&files, files.len()), open).unwrap();
        let hands = Hands::new(files.len()).unwrap();
        let (sender, rung) = mpsc::channel();
        let back = Arc::new(Back::new(0, Arc::new(Bell(sender)).into()));
        let give = |file: usize, key: usize| {
            let image = Arc::clone(blocks.image(file).unwrap());
            let (work, offset) = (Work::Trim { fua: false }, (key % JOBS * BLOCK) as u64);
            let job = Job::Image(changes::Job { image, work, offset, len: BLOCK as u64 });
            let task = Task { job, buf: None, key, back: Arc::clone(&back) };
            assert!(hands.give(file, Class::LargeWrite, task).is_ok());
        };
        for file in 0..HUNG {
            (0..JOBS).for_each(|nr| give(file, file * JOBS + nr));
            let its = MOST >> (file + 1);
            assert_eq!(discards.iter().take(its).count(), its);
        }
        let HandStats { busy, waits, held } = hands.stats();
        assert_eq!(held, [(0, 8), (1, 4), (2, 2), (3, 1)]);
        assert_eq!((busy, waits.depth), (15, HUNG * JOBS - 15));
        let mut done = Vec::new();
        let mut take = |until: usize| {
            while done.len() < until {
                rung.recv().unwrap();
                while let Some(Done { key, result, .. }) = back.pop() {
                    assert_eq!(result.unwrap(), Outcome::Done);
                    done.push(key);
                }
            }
            done.clone()
        };
        (0..JOBS).for_each(|nr| give(HUNG, HUNG * JOBS + nr));
        assert!(take(JOBS).into_iter().all(|key| key >= HUNG * JOBS), "the others hang");
        gates.iter().for_each(|gate| open_all(gate));
        let mut all = take(JOBS * files.len());
        all.sort_unstable();
        assert!(all.into_iter().eq(0..JOBS * files.len()));
    }

    /// Jobs that hang in all hands that the image may have, and more in the queue: when two of them have ended,
    /// the urgent one that came last has had its turn: [`AGEING`](crate::admission::AGEING) gives at most one
    /// of two places to another. Each comes back once.
    #[test]
    fn what_is_urgent_overtakes_what_is_not() {
        const LONG: usize = 60;
        let (come, discards) = mpsc::channel();
        let disk = Gate::new(LONG + 1, come);
        disk.open(LONG);
        let raw: Arc<dyn BlockDevice> = Arc::clone(&disk) as _;
        let file = tempfile::tempfile().unwrap();
        let blocks = Blocks::on(1 << 20, (&[file], 1), |_| Ok(Arc::clone(&raw))).unwrap();
        let image = blocks.image(0).unwrap();
        let hands = Hands::new(1).unwrap();
        let (sender, rung) = mpsc::channel();
        let back = Arc::new(Back::new(0, Arc::new(Bell(sender)).into()));
        for key in 0..=LONG {
            let offset = (key * BLOCK) as u64;
            let work = Work::Trim { fua: false };
            let job = changes::Job { image: Arc::clone(image), work, offset, len: BLOCK as u64 };
            let task = Task { job: Job::Image(job), buf: None, key, back: Arc::clone(&back) };
            let class = if key < LONG { Class::LargeWrite } else { Class::Sync };
            assert!(hands.give(0, class, task).is_ok());
        }
        let take = |count| {
            let mut keys = Vec::new();
            while keys.len() < count {
                rung.recv_timeout(Duration::from_secs(60)).expect("what hangs is in the way");
                while let Some(done) = back.pop() {
                    assert_eq!(done.result.unwrap(), Outcome::Done);
                    keys.push(done.key);
                }
            }
            keys
        };
        let hung = discards.iter().filter(|&block| block != LONG).take(2);
        hung.for_each(|block| disk.open(block));
        let mut all = take(3);
        assert!(all.contains(&LONG), "{all:?}");
        (0..LONG).for_each(|block| disk.open(block));
        all.extend(take(LONG - 2));
        all.sort_unstable();
        assert!(all.into_iter().eq(0..=LONG));
    }
}
