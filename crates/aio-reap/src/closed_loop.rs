//! Work for a simulated device: queues that always want the same number of requests.
//!
//! ```text
//!  queue ─ask─► plug ─► engine ─► device ─► engine ─done─► queue, after its think time
//!    └──────── a request's latency ───────────────┘
//! ```

use std::collections::VecDeque;
use std::fs;
use std::io;

use crate::backend::sim::Sim;
use crate::backend::sim::random::Random;
use crate::buf::AlignedBuf;
use crate::engine::Engine;
use crate::error::SubmitError;
use crate::file::File;
use crate::histogram::Histogram;
use crate::queue::{Completion, CompletionQueue};

/// What the queues want. Times are virtual nanoseconds.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Queues; the engines have them by turns.
    pub queues: usize,
    /// Requests of each queue.
    pub depth: usize,
    /// Sizes of the reads in bytes, each with its weight among all.
    pub sizes: Vec<(u32, usize)>,
    /// What the engines' thread does for each request before the engine gets it.
    pub ask: u64,
    /// What it does for each request that is done.
    pub done: u64,
    /// Time from there until the queue wants its next one, passed elsewhere.
    pub think: u64,
}

impl Workload {
    /// The size that `place` falls on, among all weights.
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

/// What became of the requests.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Figures {
    /// Requests that are done.
    pub requests: u64,
    /// Of those, how many failed.
    pub failed: u64,
    /// Bytes transferred by the others.
    pub bytes: u64,
    /// Virtual time that passed.
    pub nanos: u64,
    /// Requests that were done without being asked for; anything but 0 is a bug.
    pub twice: u64,
    /// From when a queue wanted a request until it was done, in virtual nanoseconds.
    pub latency: Histogram,
}

impl Figures {
    /// Bytes a second; 0 if no time has passed.
    pub fn throughput(&self) -> f64 {
        if self.nanos == 0 { 0.0 } else { self.bytes as f64 * 1e9 / self.nanos as f64 }
    }
}

/// A request while its queue has it.
struct Idle {
    /// When the queue wants it done.
    since: u64,
    token: u64,
    buf: AlignedBuf,
}

/// Queues, and the event loop that serves them.
///
/// One turn of the loop polls, turns every engine, and then lets each queue hand over, under one
/// plug, all that it wants by now.
pub struct ClosedLoop<'e> {
    sim: Sim,
    engines: &'e [Engine],
    file: File,
    workload: Workload,
    random: Random,
    weights: u64,
    /// By queue, in order of time.
    idle: Vec<VecDeque<Idle>>,
    /// By token: when it was wanted, while the engine has it.
    asked: Vec<Option<u64>>,
    done: CompletionQueue<AlignedBuf>,
    /// By queue: its engine took no more when it was last asked.
    full: Vec<bool>,
    figures: Figures,
}

impl<'e> ClosedLoop<'e> {
    /// Queues that want all their requests now. The engines are those of `sim`; `seed` decides the
    /// sizes and offsets.
    ///
    /// # Errors
    ///
    /// The system's, if `/dev/zero` cannot be opened: reads need some file.
    ///
    /// # Panics
    ///
    /// Panics without an engine, or without any request.
    pub fn new(
        sim: &Sim,
        engines: &'e [Engine],
        workload: Workload,
        seed: u64,
    ) -> io::Result<Self> {
        assert!(workload.queues > 0 && workload.depth > 0, "queues that want nothing");
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
            figures: Figures::default(),
        })
    }

    /// What happened since the last call of [`reset`](Self::reset).
    pub fn figures(&self) -> &Figures {
        &self.figures
    }

    /// Forgets the figures so far, for example those of a warm-up.
    pub fn reset(&mut self) {
        let Figures { requests, failed, bytes, nanos, twice, latency } = &mut self.figures;
        [requests, failed, bytes, nanos, twice].into_iter().for_each(|figure| *figure = 0);
        latency.clear(); // in its place: nothing here allocates
    }

    /// Requests the engines have.
    pub fn outstanding(&self) -> usize {
        self.asked.iter().flatten().count()
    }

    /// Serves the queues until so many more requests are done.
    ///
    /// # Errors
    ///
    /// As [`Engine::wait`].
    pub fn run(&mut self, requests: u64) -> io::Result<()> {
        let (start, enough) = (self.sim.now(), self.figures.requests + requests);
        while self.figures.requests < enough {
            self.turn()?;
            // By turns, and first the one that has waited longest.
            let since = |&queue: &usize| self.idle[queue].front().map_or(u64::MAX, |one| one.since);
            let first = (0..self.workload.queues).min_by_key(since).unwrap_or(0);
            for queue in 0..self.workload.queues {
                self.ask((first + queue) % self.workload.queues);
            }
        }
        self.figures.nanos += self.sim.now() - start;
        Ok(())
    }

    /// Waits for what the engines have, and asks for nothing more.
    ///
    /// # Errors
    ///
    /// As [`Engine::wait`].
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
        // A full engine takes more only after a completion.
        let waiting = self.idle.iter().zip(&self.full).filter(|&(_, &full)| !full);
        let first = waiting.filter_map(|(idle, _)| idle.front());
        let polled = self.sim.poll(first.map(|first| first.since).min());
        for engine in self.engines {
            if polled {
                engine.turn();
            } else {
                engine.wait(None)?; // what is pending found no room, and nothing is in flight
            }
        }
        self.take();
        Ok(())
    }

    /// Hands over what the queue wants by now, as far as the engine takes it.
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
                Ok(()) => self.asked[token as usize] = Some(since),
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

    /// Gives what is done back to the queues.
    fn take(&mut self) {
        while let Some(Completion { token, result, buf }) = self.done.pop() {
            self.sim.spend(self.workload.done);
            let now = self.sim.now();
            self.figures.requests += 1;
            match result {
                Ok(bytes) => self.figures.bytes += bytes as u64,
                Err(_) => self.figures.failed += 1,
            }
            match self.asked[token as usize].take() {
                Some(since) => self.figures.latency.record(now - since),
                None => self.figures.twice += 1,
            }
            let since = now.saturating_add(self.workload.think);
            let queue = token as usize / self.workload.depth;
            self.idle[queue].push_back(Idle { since, token, buf });
        }
    }
}
