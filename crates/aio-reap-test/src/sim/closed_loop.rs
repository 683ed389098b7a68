//! A closed-loop workload for a simulated device: queues that each keep a fixed number of requests
//! active.
//!
//! ```text
//!  queue ─ask─► plug ─► engine ─► device ─► engine ─done─► queue, after its think time
//!    └──────── a request's latency ───────────────┘
//! ```

use std::collections::VecDeque;
use std::fs;
use std::io;

use aio_reap::{AlignedBuf, Completion, CompletionQueue, Engine, File, SubmitError};
use hdrhistogram::Histogram;

use super::Sim;
use super::random::Random;

/// The parameters of a workload. Times are virtual nanoseconds.
#[derive(Clone, Debug)]
pub struct Workload {
    /// The number of queues, which are assigned to the engines in turn.
    pub queues: usize,
    /// The number of requests of each queue.
    pub depth: usize,
    /// The sizes of the reads in bytes, each with its weight: (weight, size).
    pub sizes: Vec<(u32, usize)>,
    /// The time of the engines' thread for each request before its submission.
    pub ask: u64,
    /// The time of the engines' thread for each completed request.
    pub done: u64,
    /// The time from there to the queue's next request, which does not occupy the thread.
    pub think: u64,
}

impl Workload {
    /// Returns the size at `place`, a number below the sum of all weights.
    fn size(&self, mut place: u64) -> usize {
        for &(weight, size) in &self.sizes {
            match place.checked_sub(weight.into()) {
                Some(left) => place = left,
                None => return size,
            }
        }
        0
    }
}

/// The results of a workload.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Figures {
    /// The number of completed requests.
    pub requests: u64,
    /// The number of completed requests that failed.
    pub failed: u64,
    /// The number of bytes that the other requests transferred.
    pub bytes: u64,
    /// The virtual time that passed.
    pub nanos: u64,
    /// The number of completions without a submission. Any number but 0 is a bug.
    pub twice: u64,
    /// The times from the request of a queue to the completion, in virtual nanoseconds, to 3 digits.
    pub latency: Histogram<u64>,
}

impl Figures {
    fn new() -> Self {
        let latency = Histogram::new_with_bounds(1, 60_000_000_000, 3); // up to a minute
        let latency = latency.expect("constant bounds are valid");
        Self { requests: 0, failed: 0, bytes: 0, nanos: 0, twice: 0, latency }
    }

    /// Returns the bytes per second, or 0 if no time has passed.
    pub fn throughput(&self) -> f64 {
        if self.nanos == 0 { 0.0 } else { self.bytes as f64 * 1e9 / self.nanos as f64 }
    }
}

/// A request that is not in an engine.
struct Idle {
    /// The time at which the queue wants it.
    since: u64,
    token: u64,
    buf: AlignedBuf,
}

/// The queues of a workload, and the event loop that serves them.
///
/// One turn of the loop polls, turns every engine, and then submits the due requests of each queue
/// under one plug.
#[expect(missing_debug_implementations, reason = "a model of a workload, without a state to show")]
pub struct ClosedLoop<'e> {
    sim: Sim,
    engines: &'e [Engine],
    file: File,
    workload: Workload,
    random: Random,
    weights: u64,
    /// The idle requests of each queue, in order of time.
    idle: Vec<VecDeque<Idle>>,
    /// For each token, the time at which the request was wanted, while an engine has it.
    asked: Vec<Option<u64>>,
    done: CompletionQueue<AlignedBuf>,
    /// For each queue, whether its engine was full at the last attempt.
    full: Vec<bool>,
    figures: Figures,
}

impl<'e> ClosedLoop<'e> {
    /// Makes queues that want all their requests now. The engines must be on `sim`. `seed`
    /// determines the sizes and offsets.
    ///
    /// # Errors
    ///
    /// Returns the error of the system if `/dev/zero` cannot be opened, which the reads use.
    ///
    /// # Panics
    ///
    /// Panics if there is no engine or no request.
    pub fn new(
        sim: &Sim,
        engines: &'e [Engine],
        workload: Workload,
        seed: u64,
    ) -> io::Result<Self> {
        assert!(
            workload.queues > 0 && workload.depth > 0,
            "a workload needs a queue and a request"
        );
        let file = engines.first().expect("an engine").attach(fs::File::open("/dev/zero")?)?;
        let largest = workload.sizes.iter().map(|&(_, size)| size).max().unwrap_or(0);
        let (since, depth) = (sim.now(), workload.depth as u64);
        let queue = |queue: u64| {
            let tokens = queue * depth..(queue + 1) * depth;
            let idle = |token| Idle { since, token, buf: AlignedBuf::zeroed(largest, 1) };
            tokens.map(idle).collect()
        };
        Ok(Self {
            sim: sim.clone(),
            engines,
            file,
            random: Random::new(seed),
            weights: workload.sizes.iter().map(|&(weight, _)| u64::from(weight)).sum(),
            idle: (0..workload.queues as u64).map(queue).collect(),
            asked: vec![None; workload.queues * workload.depth],
            full: vec![false; workload.queues],
            workload,
            done: CompletionQueue::new(),
            figures: Figures::new(),
        })
    }

    /// Returns the results since the last call of [`reset`](Self::reset).
    pub fn figures(&self) -> &Figures {
        &self.figures
    }

    /// Resets the results, for example after a warm-up.
    pub fn reset(&mut self) {
        let Figures { requests, failed, bytes, nanos, twice, latency } = &mut self.figures;
        [requests, failed, bytes, nanos, twice].into_iter().for_each(|figure| *figure = 0);
        latency.reset(); // in place, without an allocation
    }

    /// Returns the number of requests in the engines.
    pub fn outstanding(&self) -> usize {
        self.asked.iter().flatten().count()
    }

    /// Serves the queues until `requests` more requests have completed.
    ///
    /// # Errors
    ///
    /// Those of [`Engine::wait`].
    pub fn run(&mut self, requests: u64) -> io::Result<()> {
        let (start, enough) = (self.sim.now(), self.figures.requests + requests);
        while self.figures.requests < enough {
            self.turn()?;
            // The queues take turns. The one that has waited longest is first.
            let since = |&queue: &usize| self.idle[queue].front().map_or(u64::MAX, |one| one.since);
            let first = (0..self.workload.queues).min_by_key(since).unwrap_or(0);
            for queue in 0..self.workload.queues {
                self.ask((first + queue) % self.workload.queues);
            }
        }
        self.figures.nanos += self.sim.now() - start;
        Ok(())
    }

    /// Waits for the requests in the engines, without new ones.
    ///
    /// # Errors
    ///
    /// Those of [`Engine::wait`].
    pub fn drain(&mut self) -> io::Result<()> {
        let start = self.sim.now();
        for engine in self.engines {
            engine.drain()?;
            self.take();
        }
        self.figures.nanos += self.sim.now() - start;
        Ok(())
    }

    fn turn(&mut self) -> io::Result<()> {
        // A full engine takes more requests only after a completion.
        let waiting = self.idle.iter().zip(&self.full).filter(|&(_, &full)| !full);
        let first = waiting.filter_map(|(idle, _)| idle.front());
        let polled = self.sim.poll(first.map(|first| first.since).min());
        for engine in self.engines {
            if polled {
                engine.turn();
            } else {
                engine.wait(None)?; // pending requests found no room, and none is in flight
            }
        }
        self.take();
        Ok(())
    }

    /// Submits the due requests of a queue, as many as the engine takes.
    fn ask(&mut self, queue: usize) {
        let engine = &self.engines[queue % self.engines.len()];
        self.full[queue] = false;
        let plug = engine.plug();
        while let Some(idle) = self.idle[queue].pop_front() {
            if idle.since > self.sim.now() {
                self.idle[queue].push_front(idle);
                break;
            }
            let Idle { since, token, mut buf } = idle;
            self.sim.spend(self.workload.ask);
            buf.set_len(self.workload.size(self.random.below(self.weights)));
            let offset = self.random.below(1 << 30) << 12;
            match engine.read(&self.file, buf, offset).enqueue(&self.done, token) {
                Ok(_) => self.asked[token as usize] = Some(since),
                Err(SubmitError::Full(read)) => {
                    let idle = Idle { since, token, buf: read.into_buf() };
                    self.idle[queue].push_front(idle);
                    self.full[queue] = true;
                    break;
                }
                Err(error) => unreachable!("the engine is open, the file not direct: {error}"),
            }
        }
        drop(plug);
        self.take();
    }

    /// Returns completed requests to the queues.
    fn take(&mut self) {
        while let Some(Completion { token, result, buf, .. }) = self.done.pop() {
            self.sim.spend(self.workload.done);
            let now = self.sim.now();
            self.figures.requests += 1;
            match result {
                Ok(bytes) => self.figures.bytes += bytes as u64,
                Err(_) => self.figures.failed += 1,
            }
            match self.asked[token as usize].take() {
                Some(since) => self.figures.latency.saturating_record(now - since),
                None => self.figures.twice += 1,
            }
            let since = now.saturating_add(self.workload.think);
            let queue = token as usize / self.workload.depth;
            self.idle[queue].push_back(Idle { since, token, buf });
        }
    }
}
