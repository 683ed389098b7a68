//! The simulated device: the clock, the servers, and the requests of each engine.
//!
//! ```text
//!  submit ──► a server: the one that is free first ──► in flight, by time ──clock──► visible ──► reap
//! ```
//!
//! # Invariants
//!
//! 1. The clock never goes back.
//! 2. The behaviour depends only on the model, the seed and the calls. `origin` only converts
//!    times.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::fs::File;
use std::io::{self, Read, Write};
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::time::Instant;

use aio_reap::external::{RawCompletion, Request, Stop, Submitted};

use super::model::{Costs, Model, Service};
use super::random::Random;
use super::script::{Cancel, Directions, Transfer};

/// The state of a simulation.
#[derive(Debug)]
pub(super) struct World {
    pub(super) model: Model,
    pub(super) clock: u64,
    /// The real time at the clock's 0.
    pub(super) origin: Instant,
    random: Random,
    /// The time at which each server is free.
    servers: BinaryHeap<Reverse<u64>>,
    /// Whether the current run of a bursty device is slow.
    slow: bool,
    /// The ring of each engine. An engine keeps its index while it lives.
    pub(super) rings: Vec<Option<Ring>>,
    /// The number of accepted requests. Of requests that end at the same time the older one is
    /// first.
    accepted: u64,
    /// The number of reaped requests, and the sum of their times from the submission to the reap.
    pub(super) reaped: u64,
    pub(super) in_device: u64,
    pub(super) fingerprint: u64,
    /// The decisions of the test, in script mode.
    pub(super) script: Option<Directions>,
}

/// The requests of one engine in flight.
#[derive(Debug)]
pub(super) struct Ring {
    /// Sorted by [`InFlight::key`]. A deque, which keeps its memory: a test that counts allocations then
    /// sees those of the engine only.
    in_flight: VecDeque<InFlight>,
    notifier: Notifier,
    /// The notifier is readable.
    rung: bool,
}

/// The time of a completion that a script has not told.
const NEVER: u64 = u64::MAX;

/// A request in flight.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    /// The time of the completion, [`NEVER`] before a script tells it.
    at: u64,
    number: u64,
    /// The times at which the device took it and at which a server begins.
    since: u64,
    begins: u64,
    request: Request,
    end: Transfer,
    /// The result, after a script has completed it: as in the kernel, it is performed before the reap.
    result: Option<i32>,
}

impl InFlight {
    fn key(&self) -> (u64, u64) {
        (self.at, self.number)
    }
}

impl Ring {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { in_flight: VecDeque::new(), notifier: Notifier::new()?, rung: false })
    }

    fn insert(&mut self, new: InFlight) {
        let at = self.in_flight.partition_point(|one| one.key() < new.key());
        self.in_flight.insert(at, new);
    }

    /// Returns the number of requests whose completion is before `time`, the index of the others.
    fn before(&self, time: u64) -> usize {
        self.in_flight.partition_point(|one| one.at < time)
    }

    /// Returns the number of requests that a script has not completed.
    fn waiting(&self) -> usize {
        self.in_flight.len() - self.before(NEVER)
    }

    pub(super) fn len(&self) -> usize {
        self.in_flight.len()
    }

    pub(super) fn fd(&self) -> RawFd {
        self.notifier.0.as_raw_fd()
    }

    /// Makes the descriptor readable.
    pub(super) fn signal(&mut self) {
        self.rung = true;
        self.notifier.signal();
    }

    pub(super) fn acknowledge(&mut self) {
        if mem::take(&mut self.rung) {
            self.notifier.drain();
        }
    }

    /// Returns the time at which its next request completes or has completed.
    fn next(&self) -> Option<u64> {
        self.in_flight.front().map(|first| first.at)
    }
}

/// The eventfd that the device makes readable when a completion is visible. Non-blocking.
#[derive(Debug)]
struct Notifier(File);

impl Notifier {
    fn new() -> io::Result<Self> {
        // SAFETY: the call takes no pointer.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just returned this descriptor, so it has no other owner.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    /// Makes it readable. The write fails only if the count is at its limit, where it is readable.
    fn signal(&self) {
        let _ = (&self.0).write(&1_u64.to_ne_bytes());
    }

    /// Empties it. The read fails if it is empty.
    fn drain(&self) {
        let _ = (&self.0).read(&mut [0; 8]);
    }
}

impl World {
    pub(super) fn new(model: Model, seed: u64) -> Self {
        Self {
            model,
            clock: 0,
            origin: Instant::now(),
            random: Random::new(seed),
            servers: (0..model.servers.max(1)).map(|_| Reverse(0)).collect(),
            slow: false,
            rings: Vec::new(),
            accepted: 0,
            reaped: 0,
            in_device: 0,
            fingerprint: 0,
            script: None,
        }
    }

    /// Makes a world in script mode, whose clock stands still.
    pub(super) fn scripted() -> Self {
        let costs = Costs { submission: 0, request: 0, peek: 0, completion: 0, poll: 0, wake: 0 };
        let model = Model { costs, moves_data: true, ..Model::default() };
        Self { script: Some(Directions::default()), ..Self::new(model, 0) }
    }

    /// Advances the clock by `nanos` nanoseconds of work of the calling thread.
    pub(super) fn spend(&mut self, nanos: u64) {
        self.clock = self.clock.saturating_add(nanos);
    }

    /// Advances the clock to `at`, unless that is past.
    fn sleep_until(&mut self, at: u64) {
        self.clock = self.clock.max(at);
    }

    /// Adds an event to the fingerprint (by the mixing step of `Random`).
    fn log(&mut self, what: u64, user_data: u64) {
        let event = self.clock ^ what.rotate_left(24) ^ user_data.rotate_left(40);
        self.fingerprint = Random::new(self.fingerprint ^ event).next();
    }

    pub(super) fn ring(&mut self, ring: usize) -> &mut Ring {
        self.rings[ring].as_mut().expect("an engine keeps its ring while it lives")
    }

    pub(super) fn submit(
        &mut self,
        ring: usize,
        requests: &mut dyn ExactSizeIterator<Item = Request>,
    ) -> Submitted {
        let offered = requests.len();
        self.spend(self.model.costs.submission);
        let (accepted, stop, inline) = match &mut self.script {
            Some(script) => script.submission(offered),
            None => self.share(offered),
        };
        let waiting = self.ring(ring).waiting();
        for request in requests.take(accepted) {
            self.accept(ring, request);
            if inline {
                self.complete(waiting);
            }
        }
        Submitted { accepted, stop: (accepted < offered).then_some(stop) }
    }

    /// Returns how many requests of a batch the device takes, why it takes no more, and (for a script)
    /// whether they complete at once.
    fn share(&mut self, offered: usize) -> (usize, Stop, bool) {
        let faults = self.model.faults;
        let part = |random: &mut Random| random.below(offered as u64) as usize;
        if self.random.chance(faults.busy) {
            (0, Stop::Busy, false)
        } else if self.random.chance(faults.partial) {
            (part(&mut self.random), Stop::Busy, false)
        } else if self.random.chance(faults.refused) {
            (part(&mut self.random), Stop::Failed(libc::EIO), false)
        } else {
            (offered, Stop::Busy, false)
        }
    }

    fn accept(&mut self, ring: usize, request: Request) {
        let since = self.clock;
        self.spend(self.model.costs.request);
        let (begins, at) = self.schedule(&request);
        let end = self.end(&request);
        let number = self.next_number();
        self.log(at, request.user_data);
        let new = InFlight { at, number, since, begins, request, end, result: None };
        self.ring(ring).insert(new);
    }

    fn next_number(&mut self) -> u64 {
        self.accepted += 1;
        self.accepted
    }

    /// Returns the times at which a server begins a request and at which the request completes.
    fn schedule(&mut self, request: &Request) -> (u64, u64) {
        if let Some(script) = &mut self.script {
            script.log.push(request.offset);
            return (NEVER, NEVER);
        }
        let time = self.service_time(request);
        let clock = self.clock;
        if self.random.chance(self.model.inline) {
            self.spend(time);
            return (clock, self.clock);
        }
        let mut server = self.servers.peek_mut().expect("at least one server");
        let begins = server.0.max(clock);
        server.0 = begins.saturating_add(time);
        (begins, server.0)
    }

    /// Completes the `nth` oldest request that its script has not completed. Returns false if there is
    /// none.
    pub(super) fn complete(&mut self, nth: usize) -> bool {
        let (now, number) = (self.clock, self.next_number());
        let Some(script) = &mut self.script else { return false };
        let Some(ring) = self.rings.iter_mut().flatten().next() else { return false };
        let first = ring.next() == Some(NEVER);
        let Some(one) = ring.in_flight.remove(ring.before(NEVER) + nth) else { return false };
        let end = script.transfers.pop_front().unwrap_or(Transfer::Full);
        // SAFETY: the ring has the accepted requests of a living engine that have not completed.
        let result = Some(unsafe { end.carry_out(&one.request) });
        ring.insert(InFlight { at: now, number, begins: now, result, ..one });
        if first {
            ring.signal();
        }
        true
    }

    /// Completes the oldest request of a script, unless a completion is visible.
    fn complete_oldest(&mut self) {
        if self.visible() == 0 {
            self.complete(0);
        }
    }

    fn service_time(&mut self, request: &Request) -> u64 {
        let base = match self.model.service {
            Service::Fixed(time) => time,
            Service::Exponential(mean) => self.random.exponential(mean),
            Service::Bursty { fast, slow, run } => {
                self.slow ^= self.random.below(run.max(1).into()) == 0;
                self.random.exponential(if self.slow { slow } else { fast })
            }
        };
        let Some(len) = request.transfer_len else { return base };
        let bytes = u128::from(len) * u128::from(self.model.picos_per_byte) / 1000;
        base.saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX))
    }

    /// Chooses the end of a request.
    fn end(&mut self, request: &Request) -> Transfer {
        let faults = self.model.faults;
        let len = request.transfer_len.unwrap_or(0);
        if self.random.chance(faults.failed) {
            Transfer::Fail(libc::EIO)
        } else if self.random.chance(faults.again) {
            let interrupted = self.random.below(2) == 0;
            Transfer::Fail(if interrupted { libc::EINTR } else { libc::EAGAIN })
        } else if len > 1 && self.random.chance(faults.short) {
            match request.whole(1 + self.random.below(len - 1)) {
                0 => Transfer::Full,
                bytes => Transfer::Short(bytes as usize),
            }
        } else {
            Transfer::Full
        }
    }

    /// Takes the completions that are visible at the start of the reap.
    pub(super) fn reap(&mut self, ring: usize, each: &mut dyn FnMut(RawCompletion)) {
        self.spend(self.model.costs.peek);
        let now = self.clock;
        loop {
            let ring = self.ring(ring);
            if ring.next().is_none_or(|at| at > now) {
                return;
            }
            let Some(first) = ring.in_flight.pop_front() else { return };
            let InFlight { since, request, end, result, .. } = first;
            self.reaped += 1;
            self.in_device = self.in_device.saturating_add(now - since);
            self.spend(self.model.costs.completion);
            let result = if let Some(result) = result {
                result
            } else if self.model.moves_data || request.manages_files {
                // SAFETY: the ring has the accepted requests of a living engine that have not
                // completed.
                unsafe { end.carry_out(&request) }
            } else {
                pretend(end, &request)
            };
            let user_data = request.user_data;
            self.log(u64::from(result as u32), user_data);
            each(RawCompletion { user_data, result });
        }
    }

    /// Polls for readiness, and sleeps until a completion is visible on this ring (`None`: on any)
    /// or the clock shows `until`. Returns false if neither can happen.
    pub(super) fn poll(&mut self, ring: Option<usize>, until: Option<u64>) -> bool {
        if let Some(script) = &mut self.script {
            script.waits += 1;
            self.complete_oldest();
            return true;
        }
        self.spend(self.model.costs.poll);
        let next = match ring {
            Some(ring) => self.ring(ring).next(),
            None => self.rings.iter().flatten().filter_map(Ring::next).min(),
        };
        let Some(at) = next.into_iter().chain(until).min() else { return false };
        if at > self.clock {
            self.sleep_until(at);
            self.spend(self.model.costs.wake);
        }
        true
    }

    /// Cancels a request that no server has begun. The server is idle during its time. Returns false if
    /// the script refuses the attempt.
    pub(super) fn cancel(&mut self, ring: usize, user_data: u64) -> bool {
        let now = self.clock;
        let waits = |one: &InFlight| one.request.user_data == user_data && one.begins > now;
        let found = self.ring(ring).in_flight.iter().position(waits);
        if let Some(script) = &mut self.script {
            script.cancels += 1;
            let cancel = script.cancel;
            if let (Cancel::Works, Some(index)) = (cancel, found) {
                script.transfers.push_front(Transfer::Fail(libc::ECANCELED));
                let nth = index - self.ring(ring).before(NEVER); // those that it has completed do not wait
                self.complete(nth);
            }
            return cancel != Cancel::Refused;
        }
        let ring = self.ring(ring);
        let Some(found) = found.and_then(|index| ring.in_flight.remove(index)) else { return true };
        let end = Transfer::Fail(libc::ECANCELED);
        ring.insert(InFlight { at: now, begins: now, end, ..found });
        self.log(now, user_data);
        true
    }

    pub(super) fn visible(&self) -> usize {
        let rings = self.rings.iter().flatten();
        rings.map(|ring| ring.in_flight.partition_point(|one| one.at <= self.clock)).sum()
    }
}

/// Returns the result of a request without moving its bytes.
fn pretend(end: Transfer, request: &Request) -> i32 {
    match end {
        Transfer::Full => full(request),
        Transfer::Short(bytes) => full(request).min(i32::try_from(bytes).unwrap_or(i32::MAX)),
        Transfer::Fail(errno) => -errno,
    }
}

/// Returns the number of bytes of a full transfer in one system call; 0 for other requests.
fn full(request: &Request) -> i32 {
    request.transfer_len.map_or(0, |len| i32::try_from(len).unwrap_or(i32::MAX))
}
