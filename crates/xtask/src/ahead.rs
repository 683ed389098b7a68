//! Builds for later parts, at the lowest priority, beside tests that wait.
//!
//! A job is skipped once its part has begun: the part builds for itself then. Cargo locks a target
//! folder for the time of a build, and a build at the lowest priority may not end at all while other
//! processes keep the CPUs busy. So a part takes its folder over before it builds: the job that runs
//! there is ended, which costs at most the compilations under way, and no other starts there until
//! the part's own build is done.
//!
//! A job that fails is ignored: the part fails in its turn, and says why.

use std::fs::File;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use crate::error::Result;
use crate::workspace::Workspace;

/// One build.
#[derive(Clone, Copy)]
pub(crate) struct Job {
    /// The part that needs the build.
    pub(crate) part: &'static str,
    pub(crate) name: &'static str,
    /// What cargo locks meanwhile.
    pub(crate) folder: &'static str,
    pub(crate) build: fn(&Workspace) -> Result<()>,
}

/// The jobs, and the thread that does them one after the other.
pub(crate) struct Ahead {
    jobs: Vec<Job>,
    shared: Arc<Shared>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    pending: Vec<Job>,
    running: Option<Running>,
    /// The folder in which a part builds.
    held: Option<&'static str>,
    closed: bool,
}

struct Running {
    job: Job,
    cancel: Arc<AtomicBool>,
    /// Whether the job is wanted again after it was ended.
    again: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ahead {
    /// Does nothing until [`start`](Ahead::start).
    pub(crate) fn new(jobs: Vec<Job>) -> Ahead {
        let pending = jobs.clone();
        let state = Mutex::new(State { pending, running: None, held: None, closed: false });
        let shared = Arc::new(Shared { state, changed: Condvar::new() });
        Ahead { jobs, shared, worker: Mutex::new(None) }
    }

    /// Begins with the jobs. Later calls do nothing.
    pub(crate) fn start(&self, ws: &Workspace) {
        let mut worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner);
        if worker.is_some() {
            return;
        }
        let Ok(log) = File::create(ws.target.join("ahead.log")) else { return };
        let (shared, ws, log) = (Arc::clone(&self.shared), ws.clone(), Arc::new(log));
        *worker = Some(thread::spawn(move || {
            work(&shared, |job, cancel| {
                let _ = (job.build)(&ws.idle(Arc::clone(&log), cancel));
            })
        }));
    }

    /// Reserves the target folder of a job for the caller, which does the job itself.
    ///
    /// Blocks until no job builds in that folder.
    pub(crate) fn take_over(&self, name: &str) -> Option<Held<'_>> {
        let folder = self.jobs.iter().find(|job| job.name == name)?.folder;
        let mut state = self.shared.state();
        state.pending.retain(|job| job.name != name);
        state.held = Some(folder);
        loop {
            match &mut state.running {
                Some(running) if running.job.folder == folder => {
                    running.again = running.job.name != name;
                    // Ordering: Relaxed; the flag carries nothing beside itself.
                    running.cancel.store(true, Ordering::Relaxed);
                }
                _ => return Some(Held { ahead: self }),
            }
            state = self.shared.wait(state);
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.closed = true;
        if let Some(running) = &state.running {
            running.cancel.store(true, Ordering::Relaxed); // Ordering: as in `take_over`
        }
        self.shared.changed.notify_all();
        drop(state);
        if let Some(worker) =
            mem::take(&mut *self.worker.lock().unwrap_or_else(PoisonError::into_inner))
        {
            let _ = worker.join();
        }
    }
}

/// A folder in which no job starts until this is dropped.
pub(crate) struct Held<'a> {
    ahead: &'a Ahead,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.ahead.shared.state().held = None;
        self.ahead.shared.changed.notify_all();
    }
}

/// Does the jobs in order, without those whose folder is held, until the jobs are done or unwanted.
fn work(shared: &Shared, run: impl Fn(Job, Arc<AtomicBool>)) {
    let mut state = shared.state();
    while !state.closed && (!state.pending.is_empty() || state.held.is_some()) {
        let held = state.held;
        let Some(next) = state.pending.iter().position(|job| Some(job.folder) != held) else {
            state = shared.wait(state);
            continue;
        };
        let job = state.pending.remove(next);
        let cancel = Arc::new(AtomicBool::new(false));
        state.running = Some(Running { job, cancel: Arc::clone(&cancel), again: false });
        drop(state);
        run(job, cancel);
        state = shared.state();
        if state.running.take().is_some_and(|running| running.again) {
            state.pending.insert(0, job);
        }
        shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn job(name: &'static str, folder: &'static str) -> Job {
        Job { part: name, name, folder, build: |_| Ok(()) }
    }

    /// Jobs that run until they are cancelled; returns what has run in the end.
    fn with_endless_jobs(
        jobs: Vec<Job>,
        act: impl FnOnce(&Ahead, &dyn Fn(&str)),
    ) -> Vec<&'static str> {
        let ahead = Ahead::new(jobs);
        let ran = Mutex::new(Vec::new());
        thread::scope(|scope| {
            scope.spawn(|| {
                work(&ahead.shared, |job, cancel| {
                    ran.lock().unwrap().push(job.name);
                    while !cancel.load(Ordering::Relaxed) {
                        thread::sleep(Duration::from_millis(1));
                    }
                });
            });
            let until_running = |name: &str| {
                while ran.lock().unwrap().last().is_none_or(|last| *last != name) {
                    thread::sleep(Duration::from_millis(1));
                }
            };
            act(&ahead, &until_running);
            let mut state = ahead.shared.state();
            state.closed = true;
            if let Some(running) = &state.running {
                running.cancel.store(true, Ordering::Relaxed);
            }
            ahead.shared.changed.notify_all();
        });
        ran.into_inner().unwrap()
    }

    #[test]
    fn a_part_ends_the_job_in_its_folder_and_the_others_go_on() {
        let jobs = vec![job("a", "x"), job("b", "x"), job("c", "y")];
        let ran = with_endless_jobs(jobs, |ahead, until_running| {
            until_running("a");
            let held = ahead.take_over("b"); // ends a, which is wanted later
            until_running("c");
            drop(held);
            drop(ahead.take_over("c"));
            until_running("a");
        });
        assert_eq!(ran, ["a", "c", "a"], "b is done by its part");
    }

    #[test]
    fn a_job_that_has_not_begun_is_left_to_its_part() {
        let ahead = Ahead::new(vec![job("a", "x")]);
        assert!(ahead.take_over("a").is_some());
        assert!(ahead.take_over("unknown").is_none());
        work(&ahead.shared, |_, _| panic!("nothing is left to do"));
    }
}
