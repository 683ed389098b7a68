//! What a reader of the source asked: of deferred removals, of long walks, of hits.
#![cfg(not(any(offlock_loom, offlock_shuttle, offlock_virtual_cpu)))]

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use percpu_list::{CpuId, Domain, PerCpuList, SlotPolicy};

static CPU: CpuId = CpuId::new(0);

/// Counts its drop.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Relaxed);
    }
}

/// What a locked walk's own thread drops is gone when the walk is over, though nobody comes again.
#[test]
fn inv09_what_a_walk_dropped_is_gone_when_it_ends() {
    let list = PerCpuList::new();
    let last = CpuId::new(list.domain().slots() as u32 - 1);
    let drops = Arc::new(AtomicUsize::new(0));
    let entries =
        || [CPU, last].map(|cpu| Some(list.insert_on(cpu, Counted(Arc::clone(&drops))).unwrap()));
    let mut all = entries();
    list.for_each(|_| all.iter_mut().for_each(|entry| drop(entry.take()))).unwrap();
    assert_eq!((list.len(), drops.load(Relaxed)), (0, 2));

    let mut all = entries();
    let snapshot = list.lock_all().unwrap();
    all.iter_mut().for_each(|entry| drop(entry.take()));
    assert_eq!((snapshot.len(), drops.load(Relaxed)), (2, 2));
    drop(snapshot);
    assert_eq!((list.len(), drops.load(Relaxed)), (0, 4));
}

/// A handler may end the entry that has the last `Arc` of its list, and drop nothing.
#[test]
fn inv14_the_list_of_a_deferred_removal_is_dropped_by_who_takes_it() {
    let drops = Arc::new(AtomicUsize::new(0));
    let list = Arc::new(PerCpuList::new());
    let entry = list.insert_arc(Counted(Arc::clone(&drops))).unwrap();
    drop(list);
    let list = entry.defer_remove_keeping();
    assert_eq!((drops.load(Relaxed), Arc::strong_count(&list)), (0, 1));
    drop(list);
    assert_eq!(drops.load(Relaxed), 1);
}

/// A node's hits are those of its CPUs, whatever the slots.
#[test]
fn inv15_a_removal_on_the_same_node_is_a_hit_of_it_in_every_policy() {
    let nodes = percpu::topology().nodes().len();
    let slots = Domain::new().slots();
    for policy in [SlotPolicy::PerCpu, SlotPolicy::PerNode, SlotPolicy::Fixed(slots)] {
        let list = PerCpuList::new_in(&Domain::with_policy(policy));
        let entry = list.insert_on(CPU, 1).unwrap();
        entry.remove_on(CpuId::new(slots as u32 - 1)).unwrap();
        let stats = list.stats();
        if nodes == 1 {
            assert_eq!((stats.removals, stats.node_hits), (1, 1), "{policy:?}");
        }
        assert!(stats.cpu_hits <= stats.node_hits);
    }
}

/// Slots that a value went through do not keep it, nor its memory after a flush.
#[test]
fn spare_nodes_have_no_values() {
    let list = PerCpuList::new();
    let value = Rc::new(());
    for _ in 0..100 {
        let entries = [(); 20].map(|()| list.insert(Rc::clone(&value)).unwrap());
        drop(entries);
        assert_eq!(Rc::strong_count(&value), 1);
    }
    list.flush().unwrap();
    list.validate();
}
