use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use proptest::prelude::*;

use super::*;
use crate::topology;

/// Checks the addresses of the slots against invariant 2.
fn check_spacing<T: Default>() {
    let slots = PerCpu::<T>::default();
    let at: Vec<usize> = slots.iter().map(|(_, slot)| std::ptr::from_ref(slot).addr()).collect();
    assert_eq!(at.len(), slots.capacity());
    assert!(at.iter().all(|at| at % 128 == 0), "{at:?}");
    let apart = size_of::<T>().max(1).next_multiple_of(128);
    assert!(at.windows(2).all(|pair| pair[1] - pair[0] == apart), "{at:?}");
}

#[test]
fn inv18_slots_of_any_size_are_on_lines_of_their_own() {
    check_spacing::<u8>();
    check_spacing::<[u64; 16]>();
    check_spacing::<[u64; 17]>();
    for (size, align) in [
        (size_of::<Slot<u8>>(), align_of::<Slot<u8>>()),
        (size_of::<Slot<[u8; 128]>>(), align_of::<Slot<[u8; 128]>>()),
        (size_of::<Slot<[u8; 129]>>(), align_of::<Slot<[u8; 129]>>()),
    ] {
        assert_eq!((size % 128, align), (0, 128));
    }
}

proptest! {
    /// Two values have no line in common, wherever in a line they start.
    #[test]
    fn inv18_no_line_holds_two_values(count in 1_usize..40) {
        let slots: Vec<Slot<[u8; 72]>> = (0..count).map(|_| CachePadded::new([0; 72])).collect();
        let lines = slots.iter().map(|slot| {
            let at = std::ptr::from_ref::<[u8; 72]>(slot).addr();
            (at / 128, (at + size_of_val(&**slot) - 1) / 128)
        });
        let lines: Vec<_> = lines.collect();
        prop_assert!(lines.windows(2).all(|pair| pair[0].1 < pair[1].0), "{lines:?}");
    }
}

#[test]
fn every_cpu_has_a_slot_and_no_slot_is_beyond_capacity() {
    let mut slots = PerCpu::new(CpuId::get);
    assert_eq!(slots.capacity(), topology().capacity());
    assert!(topology().possible().iter().all(|cpu| slots.get(cpu) == Some(&cpu.get())));
    assert!((*slots.local() as usize) < slots.capacity());
    let beyond = CpuId::new(slots.capacity() as u32);
    assert_eq!(slots.get(beyond), None);
    assert_eq!(slots.get_mut(beyond), None);
    assert_eq!(slots.get(CpuId::new(u32::MAX)), None);

    *slots.get_mut(CpuId::new(0)).unwrap() = 5;
    let want = |cpu: CpuId| if cpu.get() == 0 { 5 } else { cpu.get() };
    assert!(slots.iter().all(|(cpu, &slot)| slot == want(cpu)));
    assert_eq!(slots.iter().len(), slots.capacity());
    assert_eq!((&slots[CpuId::new(0)], slots.iter().clone().count()), (&5, slots.capacity()));
    let backwards: Vec<CpuId> = slots.iter().rev().map(|(cpu, _)| cpu).collect();
    assert!(backwards.is_sorted_by(|a, b| a > b) && backwards.len() == slots.capacity());
    assert!(format!("{slots:?}").starts_with("{0: 5"));
}

#[test]
fn panic_of_init_drops_the_values_made_so_far() {
    let alive = Rc::new(());
    let last = topology().capacity() - 1;
    let made = catch_unwind(AssertUnwindSafe(|| {
        PerCpu::new(|cpu| {
            assert_ne!(cpu.index(), last, "the last one fails");
            Rc::clone(&alive)
        })
    }));
    assert!(made.is_err());
    assert_eq!(Rc::strong_count(&alive), 1);
}

/// `Send`, `Sync` and covariance.
#[expect(dead_code, reason = "compiling is the test")]
mod marker {
    use super::*;

    fn send<T: Send>() {}
    fn sync<T: Sync>() {}

    fn threads() {
        send::<PerCpu<Cell<u8>>>();
        sync::<PerCpu<offlock_sync::atomic::AtomicU64>>();
    }

    fn covariant<'a>(slots: PerCpu<&'static u8>) -> PerCpu<&'a u8> {
        slots
    }
}
