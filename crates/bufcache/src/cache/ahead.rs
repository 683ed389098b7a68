//! Reading before anybody asks.
//!
//! A thread of the cache's reads what it is told to, block by block. It is started by the first who
//! asks, and ends with the cache; it has no part in the cache itself but through the devices that
//! wait for it, so a cache lives until these are read.

use std::collections::VecDeque;
use std::ops::Range;

use percpu::sync::{Arc, Condvar, Mutex, hint, mutant, spawn};

use super::load::Load;
use crate::contain::{contain, contain_job};
use crate::handle::Device;

/// Most ranges that wait. A guess.
const MOST: usize = 64;
/// How often a lock is looked at that another thread has. A guess: some microseconds.
const LOOKS: u32 = if cfg!(any(offlock_loom, offlock_shuttle)) { 1 } else { 100 };

/// Asks the thread.
#[derive(Debug)]
pub(crate) struct Ahead {
    queue: Arc<Queue>,
}

#[derive(Debug)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    wanted: VecDeque<(Device, Range<u64>)>,
    /// For somebody who waits: these come first. Each has a buffer, so they cannot be too many.
    loads: VecDeque<Load>,
    started: bool,
    closed: bool,
}

/// What the thread does next.
enum Next {
    Load(Load),
    Range(Device, Range<u64>),
}

impl Ahead {
    pub(super) fn new() -> Self {
        let state = State {
            wanted: VecDeque::new(),
            loads: VecDeque::new(),
            started: false,
            closed: false,
        };
        let queue = Queue { state: Mutex::new(state), changed: Condvar::new() };
        Self { queue: Arc::new(queue) }
    }

    /// Has blocks read that are not there. Returns whether that is going to be tried. Does not wait.
    pub(crate) fn ask(&self, device: &Device, blocks: Range<u64>) -> bool {
        // Whoever has the lock is about to leave it; or was stopped there, and is not waited for.
        let Some(mut state) = (0..LOOKS).find_map(|_| {
            hint::spin_loop();
            self.queue.state.try_lock()
        }) else {
            return false;
        };
        if state.wanted.len() == MOST || !self.start(&mut state) {
            return false;
        }
        state.wanted.push_back((device.clone(), blocks));
        drop(state);
        self.queue.changed.notify_one();
        true
    }

    /// Has a block read; the load comes back where there can be no thread for it.
    pub(super) fn load(&self, load: Load) -> Result<(), Load> {
        let mut state = self.queue.state.lock();
        if state.loads.try_reserve(1).is_err() || !self.start(&mut state) {
            return Err(load);
        }
        state.loads.push_back(load);
        drop(state);
        if !mutant("ahead-is-not-told") {
            self.queue.changed.notify_one();
        }
        Ok(())
    }

    /// Sees to it that there is a thread, and room for what is asked of it.
    fn start(&self, state: &mut State) -> bool {
        if state.started {
            return true;
        }
        let queue = Arc::clone(&self.queue);
        state.started = state.wanted.try_reserve_exact(MOST).is_ok()
            && spawn("bufcache-ahead".into(), move || queue.work()).is_ok();
        state.started
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        if Arc::get_mut(&mut self.queue).is_some() {
            return; // there is no thread, or it is gone
        }
        // Nobody waits, as it would have a device of this cache. The thread is not waited for: this
        // may be the thread.
        self.queue.state.lock().closed = true;
        self.queue.changed.notify_one();
    }
}

impl Queue {
    fn work(&self) {
        let mut left = None;
        while let Some(next) = self.next(left.take()) {
            match next {
                Next::Load(load) => contain_job(|| load.read()),
                Next::Range(device, mut blocks) => {
                    if let Some(block) = blocks.next() {
                        // A panic is told to those who wait for the block, and the next get reads it.
                        let _ = contain(|| device.fetch(block));
                        left = Some((device, blocks));
                    } else {
                        contain_job(|| drop(device));
                    }
                }
            }
        }
    }

    /// Sleeps until there is something to do, or nothing more will come. `left` is what is left of the
    /// range before.
    fn next(&self, left: Option<(Device, Range<u64>)>) -> Option<Next> {
        let mut state = self.state.lock();
        if let Some((device, blocks)) = left {
            match state.loads.pop_front() {
                Some(load) => {
                    // There is room: it is one of the first that came.
                    state.wanted.push_front((device, blocks));
                    return Some(Next::Load(load));
                }
                None if !blocks.is_empty() => return Some(Next::Range(device, blocks)),
                None => {
                    // Perhaps the last of its cache, whose end takes the lock.
                    drop(state);
                    contain_job(|| drop(device));
                    state = self.state.lock();
                }
            }
        }
        loop {
            if let Some(load) = state.loads.pop_front() {
                return Some(Next::Load(load));
            }
            if let Some((device, blocks)) = state.wanted.pop_front() {
                return Some(Next::Range(device, blocks));
            }
            if state.closed {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }
}
