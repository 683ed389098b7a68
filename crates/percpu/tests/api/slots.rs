//! A slot for each CPU.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use offlock_percpu::{CpuId, PerCpu, possible_cpus};

/// Checks the addresses of the slots against invariant 2.
fn check_spacing<T: Default>() {
    let slots = PerCpu::new(|_| T::default());
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
}

#[test]
fn every_cpu_has_a_slot_and_no_slot_is_beyond_capacity() {
    let slots = PerCpu::new(CpuId::get);
    assert_eq!(slots.capacity(), possible_cpus());
    assert!((0..slots.capacity() as u32).all(|cpu| slots[CpuId::new(cpu)] == cpu));
    assert!((*slots.local() as usize) < slots.capacity());
    assert!(slots.iter().all(|(cpu, &slot)| slot == cpu.get()));
    assert_eq!(
        (slots.iter().len(), slots.iter().clone().count()),
        (slots.capacity(), possible_cpus())
    );
    let backwards: Vec<CpuId> = slots.iter().rev().map(|(cpu, _)| cpu).collect();
    assert!(backwards.is_sorted_by(|a, b| a > b) && backwards.len() == slots.capacity());
    assert!(format!("{slots:?}").starts_with("{0: 0"));
}

#[test]
fn panic_of_init_drops_the_values_made_so_far() {
    let alive = Rc::new(());
    let last = possible_cpus() - 1;
    let made = catch_unwind(AssertUnwindSafe(|| {
        PerCpu::new(|cpu| {
            assert_ne!(cpu.index(), last, "the last one fails");
            Rc::clone(&alive)
        })
    }));
    assert!(made.is_err());
    assert_eq!(Rc::strong_count(&alive), 1);
}
