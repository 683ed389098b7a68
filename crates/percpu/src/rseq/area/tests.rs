//! The area is at the same distance from the thread pointer in every thread.

use super::*;

#[test]
fn area_is_near_the_thread_pointer_in_every_thread() {
    let Ok(area) = find() else {
        return assert!(crate::cpu::rseq_ids().is_err());
    };
    assert_eq!(area.0 % 4, 0);
    let here = cpu_id(area);
    let there = std::thread::spawn(move || cpu_id(area)).join().unwrap();
    for id in [here, there] {
        assert!((id as usize) < crate::possible_cpus(), "id {}", id as i32);
    }
}
