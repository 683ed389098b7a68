//! A list driven by bytes. Each step is compared with a model of sets.
//!
//! The property tests, a test on the corpus and the fuzz target share it. It runs on one thread,
//! which stays on one CPU if it can, so that the hits are known.

mod owning;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use percpu_list::{CpuId, Domain, SlotPolicy, Stats};
use testkit::pin::{current_cpu, pin_to};

const ALIVE: u64 = 0x0a11_fe0f_0c0f_fee5;

/// A value that is counted. A read or a drop after its drop panics.
#[derive(Debug)]
pub(crate) struct Canary {
    alive: u64,
    id: u64,
    count: Arc<AtomicI64>,
}

impl Canary {
    pub(crate) fn new(id: u64, count: &Arc<AtomicI64>) -> Self {
        count.fetch_add(1, Relaxed);
        Self { alive: ALIVE, id, count: Arc::clone(count) }
    }

    pub(crate) fn id(&self) -> u64 {
        assert_eq!(self.alive, ALIVE, "read after its drop");
        self.id
    }
}

impl Drop for Canary {
    fn drop(&mut self) {
        assert_eq!(self.alive, ALIVE, "dropped twice");
        // SAFETY: `self` owns the field. The write is volatile, because no code reads the field
        // except after a bug.
        unsafe { (&raw mut self.alive).write_volatile(0xdead) };
        self.count.fetch_sub(1, Relaxed);
    }
}

/// One step: the operation and its arguments.
pub(crate) type Step = [u8; 4];

#[cfg_attr(test, allow(dead_code, reason = "the property tests have their own steps"))]
/// Runs one input, and returns the number of its steps. The first byte chooses the slots.
///
/// # Panics
///
/// Panics if the result of an operation differs from that of the model.
pub(crate) fn run(input: &[u8]) -> usize {
    let [policy, rest @ ..] = input else { return 0 };
    let policy = policy_of(*policy);
    let steps = rest.chunks(4).map(|chunk| {
        let mut step = [0; 4];
        step[..chunk.len()].copy_from_slice(chunk);
        step
    });
    run_steps(policy, steps)
}

pub(crate) fn policy_of(byte: u8) -> SlotPolicy {
    match byte % 5 {
        0 => SlotPolicy::PerCpu,
        1 => SlotPolicy::PerNode,
        n => SlotPolicy::Fixed(usize::from(n) - 1),
    }
}

pub(crate) fn run_steps(policy: SlotPolicy, steps: impl Iterator<Item = Step>) -> usize {
    pin_to(&[current_cpu()]); // so that the hits are known
    owning::run(policy, steps)
}

/// The slots of a domain, computed from the policy.
struct Slots {
    policy: SlotPolicy,
    cpus: usize,
    here: u32,
}

impl Slots {
    fn new(domain: &Domain) -> Self {
        let cpus = percpu::sync::cpu::possible();
        let mut slots = Self { policy: domain.policy(), cpus, here: 0 };
        slots.here = slots.of(percpu::sync::cpu::current());
        slots
    }

    /// Returns one of the CPUs.
    fn cpu(&self, byte: u8) -> CpuId {
        CpuId::new((usize::from(byte) % self.cpus) as u32)
    }

    /// Returns the slot of a CPU.
    fn of(&self, cpu: CpuId) -> u32 {
        match self.policy {
            SlotPolicy::PerNode => {
                let topology = percpu::topology();
                let node = topology.node_of(cpu);
                topology.nodes().iter().position(|&other| other == node).unwrap_or(0) as u32
            }
            SlotPolicy::Fixed(count) => (cpu.index() % count.clamp(1, self.cpus)) as u32,
            _ => cpu.get(),
        }
    }

    /// Returns how many slots are in use.
    fn count(&self) -> usize {
        (0..self.cpus).map(|cpu| self.of(CpuId::new(cpu as u32))).collect::<BTreeSet<_>>().len()
    }
}

/// The expected counters of a list.
#[derive(Clone, Copy, Default)]
struct Counted {
    adds: u64,
    removals: u64,
    cpu_hits: u64,
}

impl Counted {
    fn removed(&mut self, slot: u32, from: u32) {
        self.removals += 1;
        self.cpu_hits += u64::from(slot == from);
    }

    fn compare(&self, stats: &Stats, slots: &Slots) {
        assert_eq!((stats.adds, stats.removals), (self.adds, self.removals));
        assert_eq!(stats.cpu_hits, self.cpu_hits);
        assert!(stats.cpu_hits <= stats.node_hits && stats.node_hits <= stats.removals);
        assert_eq!(stats.contended, 0, "one thread");
        if slots.count() == 1 {
            assert_eq!(stats.cpu_hits, stats.removals);
            assert_eq!((stats.cpu_hit_percent(), stats.node_hit_percent()), (100.0, 100.0));
        }
    }
}

/// The values that a walk must return, and those that it may return.
struct Expected {
    /// On the list since the walk began.
    must: BTreeSet<u64>,
    /// On the list at some time since the walk began.
    may: BTreeSet<u64>,
    seen: BTreeSet<u64>,
}

impl Expected {
    fn new(linked: BTreeSet<u64>) -> Self {
        Self { must: linked.clone(), may: linked, seen: BTreeSet::new() }
    }

    fn sees(&mut self, id: u64) {
        assert!(self.may.contains(&id), "{id} was never on the list during the walk");
        assert!(self.seen.insert(id), "{id} was met twice");
    }

    fn ends(&self) {
        assert!(self.must.is_subset(&self.seen), "skipped: {:?}", &self.must - &self.seen);
    }
}
