//! The layout of a slot.

use super::*;
use crate::cpu;
use crate::lglock::LgLock;

/// This holds for any size of the value. The parker, which an unlock reads, is on the cache
/// line of the word.
#[test]
fn inv18_slots_of_different_cpus_never_share_a_line() {
    fn check<T: Default>() {
        let slots = Slot::<T>::boxed_slice(cpu::possible(), |_| T::default());
        for slot in &slots {
            assert_eq!(std::ptr::from_ref::<Slot<T>>(slot).addr() % 128, 0);
        }
        assert_eq!(size_of::<CachePadded<Slot<T>>>() % 128, 0);
        assert!(std::mem::offset_of!(Slot<T>, parker) + size_of::<Parker>() <= 64);
    }
    check::<()>();
    check::<u8>();
    check::<[u64; 12]>();
    check::<Vec<u8>>();
}

/// A slot with a small value takes 128 bytes.
#[test]
fn a_small_value_fits_in_the_line_of_its_lock() {
    assert_eq!(size_of::<CachePadded<Slot<[u64; 9]>>>(), 128);
    assert!(size_of::<LgLock<u8>>() <= 32);
}
