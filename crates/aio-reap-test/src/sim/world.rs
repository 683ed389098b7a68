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

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::time::Instant;

use aio_reap::external::{RawCompletion, Request, Stop, Submitted};

use super::model::{Model, Service};
use super::random::Random;
use crate::notifier::Notifier;
use crate::scripted::Transfer;

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
}

/// The requests of one engine in flight.
#[derive(Debug)]
pub(super) struct Ring {
    in_flight: BinaryHeap<Reverse<InFlight>>,
    /// Readable if the engine slept on it and a completion is visible.
    pub(super) notifier: Notifier,
    pub(super) rung: bool,
}

/// A request in flight, ordered by the time of its completion.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    /// The time of the completion.
    at: u64,
    number: u64,
    /// The times at which the device took it and at which a server begins.
    since: u64,
    begins: u64,
    request: Request,
    end: Transfer,
}

impl InFlight {
    fn key(&self) -> (u64, u64) {
        (self.at, self.number)
    }
}

impl Ord for InFlight {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key().cmp(&other.key())
    }
}

impl PartialOrd for InFlight {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for InFlight {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for InFlight {}

impl Ring {
    pub(super) fn new(notifier: Notifier) -> Self {
        Self { in_flight: BinaryHeap::new(), notifier, rung: false }
    }

    pub(super) fn len(&self) -> usize {
        self.in_flight.len()
    }

    /// Returns the time at which its next request completes or has completed.
    fn next(&self) -> Option<u64> {
        self.in_flight.peek().map(|Reverse(first)| first.at)
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
        }
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

    fn ring(&mut self, ring: usize) -> &mut Ring {
        self.rings[ring].as_mut().expect("an engine keeps its ring while it lives")
    }

    pub(super) fn submit(
        &mut self,
        ring: usize,
        requests: &mut dyn ExactSizeIterator<Item = Request>,
    ) -> Submitted {
        let offered = requests.len();
        self.spend(self.model.costs.submission);
        let (accepted, stop) = self.share(offered);
        for request in requests.take(accepted) {
            self.accept(ring, request);
        }
        Submitted { accepted, stop: (accepted < offered).then_some(stop) }
    }

    /// Returns how many requests of a batch the device takes, and why it takes no more.
    fn share(&mut self, offered: usize) -> (usize, Stop) {
        let faults = self.model.faults;
        let part = |random: &mut Random| random.below(offered as u64) as usize;
        if self.random.chance(faults.busy) {
            (0, Stop::Busy)
        } else if self.random.chance(faults.partial) {
            (part(&mut self.random), Stop::Busy)
        } else if self.random.chance(faults.refused) {
            (part(&mut self.random), Stop::Failed(libc::EIO))
        } else {
            (offered, Stop::Busy)
        }
    }

    fn accept(&mut self, ring: usize, request: Request) {
        let since = self.clock;
        self.spend(self.model.costs.request);
        let time = self.service_time(&request);
        let (begins, at) = if self.random.chance(self.model.inline) {
            let begins = self.clock;
            self.spend(time);
            (begins, self.clock)
        } else {
            let clock = self.clock;
            let mut server = self.servers.peek_mut().expect("at least one server");
            let begins = server.0.max(clock);
            let at = begins.saturating_add(time);
            server.0 = at;
            (begins, at)
        };
        let end = self.end(&request);
        let number = self.accepted;
        self.accepted += 1;
        self.log(at, request.user_data());
        self.ring(ring).in_flight.push(Reverse(InFlight {
            at,
            number,
            since,
            begins,
            request,
            end,
        }));
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
        let Some(len) = request.transfer_len() else { return base };
        let bytes = u128::from(len) * u128::from(self.model.picos_per_byte) / 1000;
        base.saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX))
    }

    /// Chooses the end of a request.
    fn end(&mut self, request: &Request) -> Transfer {
        let faults = self.model.faults;
        let len = request.transfer_len().unwrap_or(0);
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

    /// Takes at most `budget` completions that are visible at the start of the reap.
    pub(super) fn reap(&mut self, ring: usize, budget: usize, each: &mut dyn FnMut(RawCompletion)) {
        self.spend(self.model.costs.peek);
        let now = self.clock;
        for _ in 0..budget {
            let in_flight = &mut self.ring(ring).in_flight;
            if in_flight.peek().is_none_or(|Reverse(first)| first.at > now) {
                return;
            }
            let Some(Reverse(InFlight { since, request, end, .. })) = in_flight.pop() else {
                return;
            };
            self.reaped += 1;
            self.in_device = self.in_device.saturating_add(now - since);
            self.spend(self.model.costs.completion);
            let result = if self.model.moves_data || request.manages_files() {
                // SAFETY: the ring has the accepted requests of a living engine that have not
                // completed.
                unsafe { end.carry_out(&request) }
            } else {
                pretend(end, &request)
            };
            let user_data = request.user_data();
            self.log(u64::from(result as u32), user_data);
            each(RawCompletion { user_data, result });
        }
    }

    /// Polls for readiness, and sleeps until a completion is visible on this ring (`None`: on any)
    /// or the clock shows `until`. Returns false if neither can happen.
    pub(super) fn poll(&mut self, ring: Option<usize>, until: Option<u64>) -> bool {
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

    /// Cancels a request that no server has begun. The server is idle during its time.
    pub(super) fn cancel(&mut self, ring: usize, user_data: u64) {
        let clock = self.clock;
        let in_flight = &mut self.ring(ring).in_flight;
        let waits = |&Reverse(one): &Reverse<InFlight>| {
            one.request.user_data() == user_data && one.begins > clock
        };
        let Some(&Reverse(found)) = in_flight.iter().find(|&one| waits(one)) else { return };
        in_flight.retain(|one| one.0.number != found.number);
        let end = Transfer::Fail(libc::ECANCELED);
        in_flight.push(Reverse(InFlight { at: clock, begins: clock, end, ..found }));
        self.log(clock, user_data);
    }

    pub(super) fn visible(&self) -> usize {
        let rings = self.rings.iter().flatten();
        let all = rings.flat_map(|ring| &ring.in_flight);
        all.filter(|Reverse(one)| one.at <= self.clock).count()
    }
}

/// Returns the result of a request without moving its bytes.
fn pretend(end: Transfer, request: &Request) -> i32 {
    match end {
        Transfer::Full => request.full(),
        Transfer::Short(bytes) => request.full().min(i32::try_from(bytes).unwrap_or(i32::MAX)),
        Transfer::Fail(errno) => -errno,
    }
}
