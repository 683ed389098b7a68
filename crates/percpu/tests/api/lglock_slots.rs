//! `LgLock::try_with_slots`: a lock with a number of slots of its own, which other crates build on.

use std::thread;

use offlock_percpu::{CpuId, LgLock, LockError, topology};

use testkit::pin::{allowed_cpus, pin_to};

const ZERO: CpuId = CpuId::new(0);

/// The number of slots may be more or less than the number of CPUs.
#[test]
fn a_lock_of_so_many_slots() {
    let capacity = topology().capacity();
    for count in [1, 2, capacity, capacity + 3] {
        let lock = LgLock::try_with_slots(count, CpuId::get).unwrap();
        let slots: Vec<CpuId> = (0..count as u32).map(CpuId::new).collect();
        assert_eq!(lock.capacity(), count);
        for &slot in &slots {
            *lock.local_on(slot).unwrap() += 1;
        }
        let end = CpuId::new(count as u32);
        assert_eq!(lock.local_on(end).err(), Some(LockError::NoSuchCpu(end)));
        let values: Vec<u32> = lock.global().unwrap().iter().map(|(_, value)| *value).collect();
        assert!(values.iter().copied().eq(1..=count as u32));
        assert_eq!(lock.global().unwrap().iter_mut().len(), count);
    }
    assert!(LgLock::try_with_slots(usize::MAX, |_| ()).is_err());
    assert!(LgLock::try_with_slots(1 << 32, |_| ()).is_err());
}

/// A CPU number without a slot is an error, on every CPU.
#[test]
fn local_on_a_cpu_without_a_slot_is_an_error() {
    thread::spawn(|| {
        let (none, one) = (|_| -> u8 { unreachable!() }, |_| 0_u8);
        let none = LgLock::try_with_slots(0, none).unwrap();
        let one = LgLock::try_with_slots(1, one).unwrap();
        for cpu in allowed_cpus() {
            pin_to(&[cpu]);
            let here = offlock_percpu::current_cpu();
            let refused = Some(LockError::NoSuchCpu(here));
            assert_eq!(none.local().err(), refused);
            assert_eq!(none.try_local().err(), refused);
            let refused = refused.filter(|_| here != ZERO);
            assert_eq!(one.local().err(), refused);
            assert_eq!(one.try_local().err(), refused);
        }
        assert_eq!(none.global().unwrap().capacity(), 0);
    })
    .join()
    .unwrap();
}
