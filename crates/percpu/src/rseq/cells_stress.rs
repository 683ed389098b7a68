//! The sections on this kernel, alone and interrupted by signals, migrations and barriers, beside the
//! same instructions without a section: on an rseq area that the kernel does not know.

use std::collections::HashSet;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use testkit::pin::{allowed_cpus, pin_to};
use testkit::rng;
use testkit::signals::{ThreadTimer, handle};
use testkit::stress::{keep_running, stress_time};

use super::stress::{fake_area, sections_run};
use super::{Refused, Sections};
use crate::fence::heavy_rseq;
use crate::rseq::cells::{Block, Cell, CellSections, Head, NO_CPU, SHARD};

/// Returns sections that run as plain code, on the CPU where the thread was when it first asked.
fn unprotected(real: Sections) -> Sections {
    Sections { area: fake_area(), ..real }
}

/// A value: three words, of which one is not in a pair, and a drop.
struct Value([u64; 3]);

impl Drop for Value {
    fn drop(&mut self) {}
}

/// A block with its cells.
#[repr(C)]
struct Whole {
    block: Block,
    cells: [Cell<Value>; 64],
}

/// A shard whose current block is its only one.
#[repr(C, align(128))]
struct Shard {
    current: AtomicPtr<Block>,
}

const _: () = assert!(size_of::<Shard>() == SHARD);

/// A list with one block for each CPU.
struct TestList {
    head: Head,
    shards: Box<[Shard]>,
}

// SAFETY: the blocks change by sections and atomic operations only, and are freed by the drop.
unsafe impl Send for TestList {}
// SAFETY: `&TestList` gives `&Block`, which is `Sync`, and pointers and numbers that never change.
unsafe impl Sync for TestList {}

impl TestList {
    fn new(cpus: u32) -> Self {
        let shards: Box<[Shard]> =
            (0..cpus).map(|_| Shard { current: AtomicPtr::default() }).collect();
        for (cpu, shard) in shards.iter().enumerate() {
            let word = || AtomicU64::new(0);
            let block = Block {
                home: word(),
                adds: word(),
                seen: word(),
                misses: word(),
                special: word(),
                mask: u64::MAX,
                current: ptr::from_ref(&shard.current),
                cpu: cpu as u32,
                slot: cpu as u32,
                states: [const { AtomicU32::new(0) }; 64],
                remote: word(),
                held: word(),
                special_remote: word(),
                next: AtomicPtr::default(),
                list: ptr::null(),
                deferred: word(),
                link: AtomicPtr::default(),
                serial: 0,
            };
            let cells = [const { Cell(MaybeUninit::uninit()) }; 64];
            let whole = Box::into_raw(Box::new(Whole { block, cells }));
            shard.current.store(whole.cast(), Ordering::Relaxed);
        }
        let first = ptr::from_ref(&shards[0]).cast();
        let gate = || AtomicU64::new(0);
        let head = Head { gate: gate(), add_gate: gate(), shards: first, stride: SHARD };
        Self { head, shards }
    }

    fn blocks(&self) -> impl Iterator<Item = &Block> {
        // SAFETY: the blocks live until the drop of the list.
        self.shards.iter().map(|shard| unsafe { &*shard.current.load(Ordering::Relaxed) })
    }

    fn insert(&self, sections: Sections, value: [u64; 3]) -> Result<(*const Block, u32), Refused> {
        let cell = Cell(MaybeUninit::new(Value(value)));
        // SAFETY: there is a shard for each CPU, whose current block has cells of `Value`.
        unsafe { sections.insert(&raw const self.head, &raw const cell) }
    }

    /// Calls `refill` for the blocks, of which that of this CPU is refilled.
    fn refill(&self, sections: Sections) {
        for block in self.blocks() {
            // SAFETY: the block and its shard are alive.
            let _ = unsafe { sections.refill(block) };
        }
    }

    /// Removes by a section on any CPU.
    fn remove(
        &self,
        sections: Sections,
        (block, index): (*const Block, u32),
    ) -> Result<[u64; 3], Refused> {
        let mut out = Cell(MaybeUninit::<Value>::uninit());
        // SAFETY: the caller has the entry of the cell, in a block of this list.
        let mut done = unsafe { sections.remove(&raw const self.head, block, index, &raw mut out) };
        if done == Err(Refused::WrongCpu) {
            // SAFETY: the caller still has the entry, because the first section refused.
            done =
                unsafe { sections.remove_remote(&raw const self.head, block, index, &raw mut out) };
        }
        // SAFETY: the section has moved the value, whose drop is empty.
        done.map(|()| unsafe { out.0.assume_init_ref() }.0)
    }
}

impl Drop for TestList {
    fn drop(&mut self) {
        for shard in &self.shards {
            // SAFETY: the pointer is that of a box of `Whole`, and the cells need no drop.
            drop(unsafe { Box::from_raw(shard.current.load(Ordering::Relaxed).cast::<Whole>()) });
        }
    }
}

/// Returns the sections and the number of CPUs; `None` where none run.
fn sections() -> Option<(Sections, u32)> {
    let found = sections_run().then(|| Sections::find().expect("sections run"))?;
    Some((found, found.limit))
}

/// On one CPU a block fills up, is empty again, and another CPU frees its cells.
#[test]
fn a_block_is_filled_and_refilled() {
    let Some((sections, cpus)) = sections() else { return };
    let list = TestList::new(cpus);
    let allowed = allowed_cpus();
    pin_to(&allowed[..1]);
    for round in 0..3 {
        let mut entries: Vec<_> =
            (0..64).map(|n| list.insert(sections, [n, round, n]).unwrap()).collect();
        let places: HashSet<u32> = entries.iter().map(|entry| entry.1).collect();
        assert_eq!(places.len(), 64);
        assert_eq!(list.insert(sections, [0; 3]).err(), Some(Refused::NoRoom));
        pin_to(&allowed[allowed.len() - 1..]);
        let half = entries.split_off(32);
        for (n, entry) in half.into_iter().enumerate() {
            assert_eq!(list.remove(sections, entry), Ok([n as u64 + 32, round, n as u64 + 32]));
        }
        pin_to(&allowed[..1]);
        if allowed.len() > 1 {
            assert_eq!(list.insert(sections, [0; 3]).err(), Some(Refused::NoRoom), "not seen");
        }
        list.refill(sections);
        for (n, entry) in entries.into_iter().enumerate() {
            assert_eq!(list.remove(sections, entry), Ok([n as u64, round, n as u64]));
        }
    }
    let misses: u64 = list.blocks().map(|block| block.misses.load(Ordering::Relaxed)).sum();
    assert_eq!(misses, if allowed.len() > 1 { 96 } else { 0 });
}

/// The kernel leaves -1 in the area of such a thread, which is the CPU of no block.
#[test]
#[cfg(target_env = "gnu")]
fn a_thread_without_an_id_runs_no_section_on_a_block_of_no_cpu() {
    fn check(sections: Sections, cpus: u32) {
        let mut list = TestList::new(cpus);
        let at = list.insert(sections, [1; 3]).unwrap();
        for shard in &mut list.shards {
            // SAFETY: the block lives until the drop of the list, which only this thread has.
            unsafe { (**shard.current.get_mut()).cpu = NO_CPU };
        }
        assert_eq!(testkit::rseq::unregister(), -1);
        list.refill(sections);
        assert_eq!(list.insert(sections, [2; 3]).err(), Some(Refused::WrongCpu));
        assert_eq!(list.remove(sections, at), Err(Refused::WrongCpu));
        let home = |block: &Block| block.home.load(Ordering::Relaxed);
        assert_eq!(list.blocks().map(home).sum::<u64>(), 1);
        assert!(list.blocks().all(|block| block.seen.load(Ordering::Relaxed) == 0));
    }

    let Some((sections, cpus)) = sections() else { return };
    thread::spawn(move || check(sections, cpus)).join().unwrap();
}

extern "C" fn nothing(_: libc::c_int) {}

/// An entry on its way between threads.
struct Entry((*const Block, u32), u64);

// SAFETY: the block lives as long as the list, which outlives the threads.
unsafe impl Send for Entry {}

#[test]
#[ignore = "stress: seconds of signals, migrations and barriers"]
fn stress_inv12_no_cell_is_lost_or_given_twice() {
    let Some((sections, cpus)) = sections() else { return };
    let (list, exchange) = (TestList::new(cpus), Mutex::new(Vec::<Entry>::new()));
    let (stop, next, allowed) = (AtomicBool::new(false), AtomicU64::new(0), allowed_cpus());
    let removed = AtomicU64::new(0);
    handle(nothing);
    thread::scope(|scope| {
        for worker in 0..6 {
            let (list, exchange, stop, next, removed, allowed) =
                (&list, &exchange, &stop, &next, &removed, &allowed);
            scope.spawn(move || {
                let _signals = ThreadTimer::start(Duration::from_micros(50));
                let (mut rng, mut own) = (rng::seeded(worker), Vec::new());
                while !stop.load(Ordering::Relaxed) {
                    match rng.usize(..1000) {
                        0 => pin_to(&[allowed[rng.usize(..allowed.len())]]),
                        1..100 => exchange.lock().unwrap().extend(own.pop()),
                        100..200 => own.extend(exchange.lock().unwrap().pop()),
                        200..600 => {
                            let id = next.fetch_add(1, Ordering::Relaxed);
                            match list.insert(sections, [id, !id, id]) {
                                Ok(at) => own.push(Entry(at, id)),
                                Err(refused) => {
                                    assert_eq!(refused, Refused::NoRoom);
                                    next.fetch_sub(1, Ordering::Relaxed);
                                    list.refill(sections);
                                }
                            }
                        }
                        _ => {
                            let Some(Entry(at, id)) = own.pop() else { continue };
                            assert_eq!(list.remove(sections, at), Ok([id, !id, id]));
                            removed.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
                exchange.lock().unwrap().extend(own);
            });
        }
        let until = Instant::now() + stress_time(2);
        while Instant::now() < until {
            heavy_rseq();
            thread::sleep(Duration::from_micros(20));
        }
        stop.store(true, Ordering::Relaxed);
    });
    let left = exchange.into_inner().unwrap();
    let adds: u64 = list.blocks().map(|block| block.adds.load(Ordering::Relaxed)).sum();
    let removed = removed.into_inner();
    println!("{adds} additions, {removed} removals");
    assert_eq!(adds, removed + left.len() as u64);
    let places: HashSet<_> = left.iter().map(|entry| entry.0).collect();
    assert_eq!(places.len(), left.len());
    for Entry(at, id) in left {
        assert_eq!(list.remove(sections, at).map(|value| value[1]), Ok(!id));
    }
    let bits =
        |block: &Block| block.home.load(Ordering::Relaxed) ^ block.remote.load(Ordering::Relaxed);
    assert!(list.blocks().all(|block| bits(block) == 0) && removed > 1_000);
}

/// Adds and removes on eight threads, with the sections that `on_thread` returns there. Returns the
/// additions, and how many of them the blocks have not counted, or had a cell that was given twice.
fn additions(sections: Sections, cpus: u32, on_thread: fn(Sections) -> Sections) -> (u64, u64) {
    let (list, stop, made) = (TestList::new(cpus), AtomicBool::new(false), AtomicU64::new(0));
    let (allowed, lost) = (allowed_cpus(), AtomicU64::new(0));
    thread::scope(|scope| {
        for worker in 0..8 {
            let (list, stop, made, lost, allowed) = (&list, &stop, &made, &lost, &allowed);
            scope.spawn(move || {
                let mut rng = rng::seeded(worker);
                while !stop.load(Ordering::Relaxed) {
                    if rng.usize(..1000) == 0 {
                        pin_to(&[allowed[rng.usize(..allowed.len())]]);
                    }
                    let sections = on_thread(sections);
                    match list.insert(sections, [worker; 3]) {
                        Ok(at) => {
                            made.fetch_add(1, Ordering::Relaxed);
                            if list.remove(sections, at) != Ok([worker; 3]) {
                                lost.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                        Err(_) => list.refill(sections),
                    }
                }
            });
        }
        thread::sleep(stress_time(2) / 2);
        stop.store(true, Ordering::Relaxed);
    });
    let counted: u64 = list.blocks().map(|block| block.adds.load(Ordering::Relaxed)).sum();
    let made = made.into_inner();
    (made, made.abs_diff(counted) + lost.into_inner())
}

#[test]
#[ignore = "stress: seconds of migrations"]
fn stress_inv12_additions_are_lost_without_a_section() {
    let Some((sections, cpus)) = sections() else { return };
    let (made, lost) = additions(sections, cpus, |sections| sections);
    assert_eq!(lost, 0, "of {made}");
    let lost = (0..20).map(|_| additions(sections, cpus, unprotected).1).find(|lost| *lost > 0);
    println!("{made} additions; without a section {lost:?} were lost");
    assert!(lost.is_some(), "the disturbance is too weak to prove anything");
}

/// Closes both gates again and again while threads add and remove.
#[test]
#[ignore = "stress: seconds of closing the gates"]
fn stress_inv13_no_section_commits_after_its_gate_was_closed() {
    let Some((sections, cpus)) = sections() else { return };
    let (list, stop, refused) = (TestList::new(cpus), AtomicBool::new(false), AtomicU64::new(0));
    let state = || -> Vec<[u64; 3]> {
        let words = |block: &Block| {
            [&block.home, &block.remote, &block.adds].map(|word| word.load(Ordering::Relaxed))
        };
        list.blocks().map(words).collect()
    };
    let mut closed = 0;
    thread::scope(|scope| {
        for worker in 0..6 {
            let (list, stop, refused) = (&list, &stop, &refused);
            scope.spawn(move || {
                let mut own = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    match list.insert(sections, [worker; 3]) {
                        Ok(at) => own.push(at),
                        Err(Refused::Closed) => _ = refused.fetch_add(1, Ordering::Relaxed),
                        Err(_) => list.refill(sections),
                    }
                    if own.len() > 3 {
                        let at = own.swap_remove(0);
                        if list.remove(sections, at).is_err() {
                            own.push(at);
                        }
                    }
                }
            });
        }
        let until = Instant::now() + stress_time(2);
        while keep_running(until, || closed > 10 && refused.load(Ordering::Relaxed) > 0) {
            for gate in [&list.head.gate, &list.head.add_gate] {
                gate.store(1, Ordering::Relaxed);
            }
            heavy_rseq();
            let before = state();
            (0..2_000).for_each(|_| std::hint::spin_loop());
            thread::yield_now(); // threads that were preempted inside a section run now
            assert_eq!(state(), before, "a section committed after the barrier");
            for gate in [&list.head.gate, &list.head.add_gate] {
                gate.store(0, Ordering::Relaxed);
            }
            closed += 1;
            thread::sleep(Duration::from_micros(50));
        }
        stop.store(true, Ordering::Relaxed);
    });
    let refused = refused.into_inner();
    println!("closed {closed} times, {refused} additions refused");
    assert!(closed > 10 && refused > 0);
}
