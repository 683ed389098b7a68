use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn inv01_any_getcpu_answer_gives_a_slot_below_capacity(
        getcpu in prop_oneof![any::<i32>(), -2..200],
        slot in any::<u32>(),
        capacity in prop_oneof![1_u32..200, 1_u32..=65_536],
    ) {
        let cpu = without_rseq(getcpu, || slot, capacity);
        prop_assert!(cpu.get() < capacity);
        if (0..capacity as i32).contains(&getcpu) {
            prop_assert_eq!(cpu.get(), getcpu as u32, "an id that fits is kept");
        }
        if getcpu < 0 {
            prop_assert_eq!(cpu.get(), slot % capacity, "an error gives the thread's slot");
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(offlock_portable)))]
proptest! {
    #[test]
    fn inv01_any_rseq_id_is_a_slot_below_capacity_or_none(
        id in prop_oneof![Just(-1), Just(-2), 0..200, any::<i32>()],
        capacity in prop_oneof![1_u32..200, 1_u32..=65_536],
    ) {
        let want = (0..capacity as i32).contains(&id).then_some(id as u32);
        prop_assert_eq!(fast::below(id as u32, capacity).map(CpuId::get), want);
    }
}

#[cfg(all(target_arch = "x86_64", not(offlock_portable)))]
#[test]
fn fast_path_answers_exactly_if_the_backend_is_rseq() {
    assert_eq!(fast::current().is_some(), rseq_ids().is_ok(), "{:?}", backend());
}

/// A thread is pinned to one CPU after the other. The answer follows by the last of `REUSE_LIMIT`
/// calls, and at once if rseq keeps the id.
#[cfg(not(offlock_virtual_cpu))]
#[test]
fn recent_cpu_is_renewed_within_its_limit() {
    use testkit::pin::{allowed_cpus, pin_to};

    let hop = || {
        let mut hops = 0;
        for cpu in allowed_cpus().into_iter().cycle().take(200) {
            pin_to(&[cpu]);
            let calls = if backend().0 == Source::Rseq { 1 } else { REUSE_LIMIT };
            let seen: Vec<CpuId> = (0..calls).map(|_| recent_cpu()).collect();
            assert!(seen.iter().all(|seen| seen.get() < topology().capacity_u32()));
            if backend().0 != Source::ThreadSlot {
                assert_eq!(seen.last(), Some(&CpuId::new(cpu as u32)), "{:?}", backend());
                hops += 1;
            }
        }
        hops
    };
    // A new thread, because it stays pinned.
    let hops = std::thread::spawn(hop).join().unwrap();
    println!("{hops} hops"); // 1 allowed CPU: all hops are to it
}

#[test]
fn thread_keeps_its_slot_and_the_next_thread_gets_another() {
    let here = thread_slot();
    let there = std::thread::spawn(|| (thread_slot(), thread_slot())).join().unwrap();
    assert_eq!(here, thread_slot());
    assert_eq!(there.0, there.1);
    assert_ne!(here, there.0);
}
