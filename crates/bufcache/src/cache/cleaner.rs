//! Writes back what has been dirty for a while, and what too much of is dirty.
//!
//! A thread of the cache's, which is started by the first who dirties a block and ends with the cache. The
//! devices that have dirty buffers are listed here, and so live until these are written or dropped.
//!
//! One thread waits for the next round. Before it writes to a device beside which others have dirty buffers, it
//! sees to it that another thread waits: a device that hangs keeps one thread, and the others' buffers are written.

use std::time::Duration;

use percpu::sync::MutexGuard;
use percpu::sync::atomic::Ordering;
use percpu::sync::{Arc, Condvar, Mutex, spawn};

use super::Shared;
use super::back::{Done, Task, Tries};
use crate::contain::contain_job;
use crate::source::Source;

/// How often it looks for what is old.
const ROUND: Duration = Duration::from_millis(200);
/// Most buffers that a thread writes that needs one. A guess: enough that the next few find some.
const SOME: usize = 64;
/// Sectors that were written and never synced may be in so many ranges: then the cleaner syncs.
const MOST_EXTENTS: usize = 16 << 10;

/// When it writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// What has been dirty for so long.
    pub(crate) age: Duration,
    /// A share of the capacity in 256 parts: it begins to write when more is dirty.
    pub(crate) begin: u32,
    /// And who dirties more waits for some to be written.
    pub(crate) most: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { age: Duration::from_secs(5), begin: 26, most: 192 }
    }
}

#[derive(Debug)]
pub(crate) struct Cleaner {
    queue: Arc<Queue>,
    pub(super) limits: Limits,
}

struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    sources: Vec<Arc<Source>>,
    /// The numbers of those that a thread cleans.
    cleaning: Vec<u16>,
    started: bool,
    /// A thread waits for the next round.
    waiting: bool,
    /// Threads that wait, or are about to, until none waits for the next round.
    idle: usize,
    closed: bool,
    /// Too much is dirty.
    urgent: bool,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").finish_non_exhaustive()
    }
}

impl Cleaner {
    pub(super) fn new(limits: Limits) -> Self {
        let queue = Queue { state: Mutex::new(State::default()), changed: Condvar::new() };
        Self { queue: Arc::new(queue), limits }
    }

    /// The device has its first dirty buffer.
    pub(super) fn add(&self, source: &Arc<Source>) {
        let mut state = self.queue.state.lock();
        state.sources.push(Arc::clone(source));
        // A thread that cleans another device may hang there. A model has no cleaner.
        let needs_thread = !state.started || state.cleaning.iter().any(|&other| other != source.id);
        if needs_thread && !cfg!(any(offlock_loom, offlock_shuttle)) {
            Queue::keep_one_waiting(&self.queue, &mut state, self.limits);
        }
        let first = state.sources.len() == 1;
        drop(state);
        if first {
            self.queue.changed.notify_all();
        }
    }

    /// The device's last buffer is clean. Returns its place here, to be dropped without a lock.
    pub(super) fn remove(&self, source: &Arc<Source>) -> Option<Arc<Source>> {
        let mut state = self.queue.state.lock();
        let at = state.sources.iter().position(|known| Arc::ptr_eq(known, source))?;
        Some(state.sources.swap_remove(at))
    }

    /// The next device with dirty buffers, in turn.
    fn next(&self, at: usize) -> Option<Arc<Source>> {
        self.queue.state.lock().sources.get(at).cloned()
    }

    fn hurry(&self) {
        let mut state = self.queue.state.lock();
        let told = std::mem::replace(&mut state.urgent, true);
        drop(state);
        if !told {
            self.queue.changed.notify_all();
        }
    }
}

impl Drop for Cleaner {
    fn drop(&mut self) {
        self.queue.state.lock().closed = true;
        self.queue.changed.notify_all();
    }
}

impl Queue {
    /// Sees to it that a thread waits for the next round.
    fn keep_one_waiting(queue: &Arc<Self>, state: &mut State, limits: Limits) {
        if state.waiting || state.closed {
            return;
        }
        if state.idle > 0 {
            queue.changed.notify_all();
            return;
        }
        let new = Arc::clone(queue);
        // Without one the dirty buffers wait for a sync, or for a thread that needs their memory.
        if spawn("bufcache-clean".into(), move || Self::work(&new, limits)).is_ok() {
            state.started = true;
            state.idle += 1;
        }
    }

    fn work(queue: &Arc<Self>, limits: Limits) {
        while let Some((numbers, urgent)) = queue.next_round() {
            for number in numbers {
                let Some(source) = Self::begin(queue, number, limits) else { continue };
                contain_job(|| source.cache.clean(&source, limits, urgent));
                queue.state.lock().cleaning.retain(|other| *other != number);
                // Apart from the above: a device's drop that panics while another panic unwinds aborts.
                contain_job(|| drop(source));
            }
            let mut state = queue.state.lock();
            if state.waiting && state.idle > 0 {
                return; // enough others wait
            }
            state.idle += 1;
        }
    }

    /// The device with that number, unless another thread cleans it or it has no dirty buffers. Where others have
    /// some, a thread waits for the next round meanwhile.
    fn begin(queue: &Arc<Self>, number: u16, limits: Limits) -> Option<Arc<Source>> {
        let mut state = queue.state.lock();
        let source = state.sources.iter().find(|source| source.id == number)?;
        if state.cleaning.contains(&number) {
            return None;
        }
        let source = Arc::clone(source);
        state.cleaning.push(number);
        if state.sources.len() > 1 {
            Self::keep_one_waiting(queue, &mut state, limits);
        }
        Some(source)
    }

    /// Waits for the next round, and returns the numbers of its devices. The calling thread is idle until then.
    /// `None`: the cache is gone.
    fn next_round(&self) -> Option<(Vec<u16>, bool)> {
        let mut state = self.state.lock();
        while state.waiting && !state.closed {
            self.changed.wait(&mut state);
        }
        state.idle -= 1;
        state.waiting = true;
        let round = self.wait_for_round(&mut state);
        state.waiting = false;
        round
    }

    fn wait_for_round(&self, state: &mut MutexGuard<'_, State>) -> Option<(Vec<u16>, bool)> {
        let mut waited = false;
        loop {
            if state.closed {
                return None;
            }
            if !state.sources.is_empty() && (waited || state.urgent) {
                let urgent = std::mem::take(&mut state.urgent);
                return Some((state.sources.iter().map(|source| source.id).collect(), urgent));
            }
            if state.sources.is_empty() {
                state.urgent = false;
                self.changed.wait(state);
            } else {
                self.changed.wait_for(state, ROUND);
                waited = true;
            }
        }
    }
}

impl Shared {
    /// Milliseconds of the cache's life.
    pub(super) fn now(&self) -> u64 {
        self.since.elapsed().as_millis() as u64 // of 580 million years
    }

    pub(crate) fn dirty_bytes(&self) -> usize {
        self.dirty_bytes.load(Ordering::Relaxed) // a measure
    }

    /// One round of the cleaner's for one device.
    fn clean(&self, source: &Arc<Source>, limits: Limits, urgent: bool) {
        let before = match limits.age.as_millis() {
            _ if urgent => u64::MAX,
            age => self.now().saturating_sub(u64::try_from(age).unwrap_or(u64::MAX)),
        };
        let task = Task { before, wait: false, tries: Tries::Most, ..Task::all() };
        // What fails is remembered by the device, for its handles.
        self.write_back(source, &task);
        self.limit_extents(source);
    }

    /// Makes durable what is in so many parts that to remember them takes much memory. Who is to know of a
    /// failure finds the device poisoned.
    pub(super) fn limit_extents(&self, source: &Arc<Source>) {
        if source.writes.unsynced(|unsynced| unsynced.written.len()) > MOST_EXTENTS {
            let _ = self.sync_device(source);
        }
    }

    /// Writes a few buffers of the devices in turn. Returns how many.
    pub(super) fn clean_some(&self) -> usize {
        if self.dirty_bytes() == 0 {
            return 0;
        }
        for tries in [Tries::Promising, Tries::Most] {
            let task = Task { most: SOME, wait: false, tries, ..Task::all() };
            let mut at = 0;
            while let Some(source) = self.cleaner.next(at) {
                let written = self.write_back(&source, &task).written;
                if written > 0 {
                    return written;
                }
                at += 1;
            }
        }
        0
    }

    /// Writes a few buffers of one device: those whose write is likely to succeed, and if none was written others,
    /// as `tries` says.
    pub(super) fn clean_some_of(&self, source: &Arc<Source>, tries: Tries) -> Done {
        let task = Task { most: SOME, wait: false, tries: Tries::Promising, ..Task::all() };
        let done = self.write_back(source, &task);
        if done.written > 0 {
            return done;
        }
        self.write_back(source, &Task { tries, ..task })
    }

    /// Whether so much is dirty that some has to be written before more becomes dirty. If it is less, but
    /// enough to begin, wakes the cleaner.
    pub(super) fn is_too_dirty(&self) -> bool {
        let dirty = self.dirty_bytes() as u64 * 256;
        let capacity = self.room() as u64;
        let limits = self.cleaner.limits;
        let too_dirty = dirty > capacity * u64::from(limits.most);
        if !too_dirty && dirty > capacity * u64::from(limits.begin) {
            self.cleaner.hurry();
        }
        too_dirty
    }

    pub(super) fn hurry_cleaner(&self) {
        self.cleaner.hurry();
    }

    /// The most bytes that may be dirty.
    pub(super) fn most_dirty(&self) -> usize {
        (self.room() as u64 * u64::from(self.cleaner.limits.most) / 256) as usize
    }
}
