//! The blocking pool of a cache: threads that call blocking methods of devices and of the cache for
//! tasks, and write back dirty buffers in rounds.
//!
//! ```text
//!  device A: | clean: due | load, load, load |  read by PER_DEVICE threads at most, cleaned by one
//!  device B: | clean: -   | load             |
//!                 └─► the next job of the next device ─► a thread
//! ```
//!
//! Each device has a queue of its own, so a device that hangs delays only its own jobs. Before a
//! thread begins a job, it makes sure that another thread waits if there is, or may soon be, work
//! of other devices. The threads refer to the cache only through the sources of their jobs, and end
//! with it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use offlock_sync::std_lock::{Condvar, Mutex, MutexGuard};
use offlock_sync::{Arc, spawn, step};

use super::miss::Load;
use crate::frames::Frame;
use crate::source::Source;
use crate::wait::contain_job;

/// The period in which the devices with dirty buffers are checked.
const ROUND: Duration = Duration::from_millis(200);
/// The most threads that read one device at the same time. A disk can reorder that many
/// reads.
const PER_DEVICE: usize = if cfg!(offlock_model) { 1 } else { 4 };
/// The most threads that make calls of one lane of a device. A call may wait for a guard.
const CALLS: usize = if cfg!(offlock_model) { 1 } else { 16 };
/// A thread without a job ends if this many other threads wait already.
const MOST_IDLE: usize = 2;
/// A model has no rounds, because it has no time.
const HAS_ROUNDS: bool = !cfg!(offlock_model);

/// A call of a task that may block.
pub(crate) type Call = Box<dyn FnOnce() + Send>;

/// A queue of jobs of a device. Each has threads of its own, because a call of a task may wait for a load or
/// a deferred operation of its device, which must not queue behind such calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    Load,
    /// Deferred operations. Each calls a method of the device, and then perhaps the next step of the
    /// task's operation, which does not block. So none waits for another job.
    Device,
    /// Calls of tasks.
    Task,
}

impl Lane {
    const ALL: [Self; 3] = [Self::Load, Self::Device, Self::Task];

    /// Returns the most threads that do jobs of the lane.
    fn most(self) -> usize {
        if self == Self::Load { PER_DEVICE } else { CALLS }
    }
}

/// Starts the threads and queues jobs for them.
pub(crate) struct Pool {
    queue: Arc<Queue>,
}

struct Queue {
    /// A lock of `std`, as a miss takes it: `parking_lot` allocates when a thread first waits.
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// The devices that have dirty buffers or jobs.
    devices: Vec<Work>,
    /// The index of the device whose turn is next.
    turn: usize,
    threads: usize,
    /// The number of threads that wait for a job.
    idle: usize,
    /// Set while a waiting thread has a timeout for the next round.
    timed: bool,
    /// The latest begin of the next round.
    next_round: Instant,
    /// Set to begin the next round now.
    urgent: bool,
    closed: bool,
    /// Empty queues with capacity, for the next device that has jobs.
    spare: [VecDeque<Job>; 3],
}

/// The jobs of one device.
struct Work {
    id: u16,
    /// The device while it has dirty buffers, which keeps it alive until these are written or
    /// dropped.
    dirty: Option<Arc<Source>>,
    clean: Clean,
    /// For each [`Lane`].
    queues: [VecDeque<Job>; 3],
    /// For each [`Lane`] the number of threads that do one of its jobs.
    running: [usize; 3],
}

/// The state of a device in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Clean {
    No,
    Due {
        urgent: bool,
    },
    /// A thread cleans the device.
    Now,
}

/// One job of a thread.
pub(super) enum Job {
    Load(Load),
    Clean(Arc<Source>, bool),
    Call(Call),
}

impl Work {
    /// Returns the lane of the next job but a round.
    fn next_lane(&self) -> Option<Lane> {
        let has_job = |lane: &Lane| {
            let at = *lane as usize;
            !self.queues[at].is_empty() && self.running[at] < lane.most()
        };
        Lane::ALL.into_iter().find(has_job)
    }

    fn has_job(&self) -> bool {
        matches!(self.clean, Clean::Due { .. }) || self.next_lane().is_some()
    }

    /// Takes the next job. Its lane is `None` for a round.
    fn take_job(&mut self) -> Option<(Option<Lane>, Job)> {
        if let (Clean::Due { urgent }, Some(source)) = (self.clean, &self.dirty) {
            self.clean = Clean::Now;
            return Some((None, Job::Clean(Arc::clone(source), urgent)));
        }
        let lane = self.next_lane()?;
        self.running[lane as usize] += 1;
        self.queues[lane as usize].pop_front().map(|job| (Some(lane), job))
    }

    fn end_job(&mut self, lane: Option<Lane>) {
        match lane {
            Some(lane) => self.running[lane as usize] -= 1,
            None => self.clean = Clean::No,
        }
    }

    fn is_over(&self) -> bool {
        let has_jobs = self.running != [0; 3] || self.queues.iter().any(|jobs| !jobs.is_empty());
        self.dirty.is_none() && !has_jobs && self.clean != Clean::Now
    }
}

impl State {
    fn position(&self, id: u16) -> Option<usize> {
        self.devices.iter().position(|work| work.id == id)
    }

    /// Returns the work of a device, which it adds if there is none.
    fn work(&mut self, id: u16) -> &mut Work {
        let at = self.position(id).unwrap_or(self.devices.len());
        if at == self.devices.len() {
            let queues = std::mem::take(&mut self.spare);
            self.devices.push(Work { id, dirty: None, clean: Clean::No, queues, running: [0; 3] });
        }
        &mut self.devices[at]
    }

    fn forget_if_over(&mut self, at: usize) {
        if self.devices[at].is_over() {
            for (spare, queue) in self.spare.iter_mut().zip(self.devices.swap_remove(at).queues) {
                if queue.capacity() > spare.capacity() {
                    *spare = queue;
                }
            }
        }
    }

    fn has_dirty(&self) -> bool {
        HAS_ROUNDS && self.devices.iter().any(|work| work.dirty.is_some())
    }

    /// Returns whether another thread is needed while one does a job of that device: for jobs, or
    /// to begin the next round. The round may clean the same device, whose load or call may take
    /// long.
    fn needs_another(&self, id: u16) -> bool {
        let may_clean =
            |work: &Work| work.dirty.is_some() && (work.id != id || work.clean != Clean::Now);
        let needs_timer = HAS_ROUNDS && !self.timed;
        self.devices.iter().any(Work::has_job)
            || (needs_timer && self.devices.iter().any(may_clean))
    }

    /// Begins a round if it is due. Skips devices whose last round is not over.
    fn begin_round(&mut self) {
        if !self.has_dirty() {
            self.urgent = false;
            return;
        }
        let now = Instant::now();
        if !self.urgent && now < self.next_round {
            return;
        }
        self.next_round = now + ROUND;
        let urgent = std::mem::take(&mut self.urgent);
        let dirty = self.devices.iter_mut().filter(|work| work.dirty.is_some());
        for work in dirty.filter(|work| work.clean != Clean::Now) {
            work.clean = Clean::Due { urgent };
        }
    }

    /// Takes the next job, of the devices in turn.
    fn take_job(&mut self) -> Option<(u16, Option<Lane>, Job)> {
        let count = self.devices.len();
        for next in 0..count {
            let at = (self.turn + next) % count;
            let work = &mut self.devices[at];
            if let Some((lane, job)) = work.take_job() {
                self.turn = at + 1;
                return Some((work.id, lane, job));
            }
        }
        None
    }
}

impl Pool {
    pub(super) fn new() -> Self {
        let state = State {
            devices: Vec::new(),
            turn: 0,
            threads: 0,
            idle: 0,
            timed: false,
            next_round: Instant::now(),
            urgent: false,
            closed: false,
            spare: Default::default(),
        };
        let queue = Queue { state: Mutex::new(state), changed: Condvar::new() };
        Self { queue: Arc::new(queue) }
    }

    /// Queues a job for a thread. Returns whether it waits for those before it. A thread that needs the block
    /// of a load that does may [take](Self::take_queued) the load.
    ///
    /// # Errors
    ///
    /// The job, if no thread can be started or there is no memory to queue it.
    pub(super) fn queue(&self, device: u16, lane: Lane, job: Job) -> Result<bool, Job> {
        let mut state = self.queue.state.lock();
        let has_thread = Queue::ensure_idle_thread(&self.queue, &mut state) || state.threads > 0;
        let (work, at) = (state.work(device), lane as usize);
        if !has_thread || work.queues[at].try_reserve(1).is_err() {
            return Err(job);
        }
        let is_behind = work.running[at] + work.queues[at].len() >= lane.most();
        work.queues[at].push_back(job);
        drop(state);
        step!("pool: tell a thread", self.queue.changed.notify_one());
        Ok(is_behind)
    }

    /// Takes the load of that frame out of the queue, for a thread that otherwise sleeps until its
    /// end.
    ///
    /// Needed because the threads of the pool may wait for that thread, or run verifiers that need
    /// the block. The thread calls this after it is listed as a waiter at the frame. A load that is queued
    /// behind others later wakes it.
    pub(super) fn take_queued(&self, device: u16, frame: Frame) -> Option<Load> {
        let mut state = self.queue.state.lock();
        let at = state.position(device)?;
        let jobs = &mut state.devices[at].queues[Lane::Load as usize];
        let is_it = |job: &Job| matches!(job, Job::Load(load) if load.frame() == frame);
        let job = jobs.remove(jobs.iter().position(is_it)?);
        state.forget_if_over(at);
        let Some(Job::Load(load)) = job else { return None };
        Some(load)
    }

    /// Notes the first dirty buffer of a device.
    pub(super) fn add_dirty(&self, source: &Arc<Source>) {
        let mut state = self.queue.state.lock();
        if !state.has_dirty() {
            state.next_round = Instant::now() + ROUND;
        }
        state.work(source.id).dirty = Some(Arc::clone(source));
        let tell = HAS_ROUNDS && !state.timed;
        if tell {
            // If no thread can be started, a sync or a thread that needs memory writes the buffers.
            Queue::ensure_idle_thread(&self.queue, &mut state);
        }
        drop(state);
        if tell {
            self.queue.changed.notify_one();
        }
    }

    /// Notes that a device has no dirty buffer. Returns the reference to it, which the caller drops
    /// without a lock.
    pub(super) fn remove_dirty(&self, source: &Arc<Source>) -> Option<Arc<Source>> {
        let mut state = self.queue.state.lock();
        let at = state.position(source.id)?;
        let work = &mut state.devices[at];
        if matches!(work.clean, Clean::Due { .. }) {
            work.clean = Clean::No;
        }
        let removed = work.dirty.take();
        state.forget_if_over(at);
        removed
    }

    /// Begins a round without delay, because too many buffers are dirty. Does nothing while every
    /// device with dirty buffers is being cleaned, or is about to be.
    pub(super) fn hurry(&self) {
        let mut state = self.queue.state.lock();
        let waits = |work: &Work| work.dirty.is_some() && work.clean == Clean::No;
        let tell = !state.urgent && state.devices.iter().any(waits);
        state.urgent |= tell;
        drop(state);
        if tell {
            self.queue.changed.notify_one();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // No job is left, because each keeps the cache alive. Does not join the threads, because
        // this may be one of them.
        self.queue.state.lock().closed = true;
        self.queue.changed.notify_all();
    }
}

impl Queue {
    /// Starts a thread if none waits for a job. Returns whether one waits now.
    fn ensure_idle_thread(queue: &Arc<Self>, state: &mut State) -> bool {
        if state.idle > 0 {
            return true;
        }
        let new = Arc::clone(queue);
        let started = spawn("bufcache".into(), move || Self::work(&new)).is_ok();
        // Counts as waiting from now on, so that no other thread is started instead.
        state.threads += usize::from(started);
        state.idle += usize::from(started);
        started
    }

    fn work(queue: &Arc<Self>) {
        let mut state = queue.state.lock();
        state.idle -= 1;
        while let Some((id, lane, job)) = queue.next_job(&mut state) {
            if state.needs_another(id) && Self::ensure_idle_thread(queue, &mut state) {
                queue.changed.notify_one();
            }
            drop(state);
            match job {
                Job::Load(load) => contain_job(|| load.read_here(0)),
                Job::Clean(source, urgent) => {
                    contain_job(|| source.cache.clean(&source, urgent));
                    // Separately, because a drop that panics while another panic unwinds aborts.
                    contain_job(|| drop(source));
                }
                Job::Call(call) => contain_job(call),
            }
            state = queue.state.lock();
            let Some(at) = state.position(id) else { continue };
            state.devices[at].end_job(lane);
            state.forget_if_over(at);
        }
        state.threads -= 1;
    }

    /// Waits for a job. Returns `None` if the cache is gone or enough other threads wait.
    fn next_job(&self, state: &mut MutexGuard<'_, State>) -> Option<(u16, Option<Lane>, Job)> {
        loop {
            state.begin_round();
            if let Some(job) = state.take_job() {
                return Some(job);
            }
            let needs_timer = state.has_dirty() && !state.timed;
            if state.closed || (state.idle >= MOST_IDLE && !needs_timer) {
                return None;
            }
            state.idle += 1;
            if needs_timer {
                state.timed = true;
                let left = state.next_round.saturating_duration_since(Instant::now());
                self.changed.wait_for(state, left);
                state.timed = false;
            } else {
                self.changed.wait(state);
            }
            state.idle -= 1;
        }
    }
}
