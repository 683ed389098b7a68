//! The red-black tree of an [`RbTree`]: odd orders, and its nodes. Its order is that of the step machine.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use mq_rbtree::{AllocError, Core, RbTree};
use testkit::alloc::{Calls, calls, refuse_after, thread_bytes};

/// Returns the bytes that `f` allocates minus those that it frees.
fn bytes_of<R>(f: impl FnOnce() -> R) -> (R, i64) {
    let before = thread_bytes();
    let result = f();
    (result, thread_bytes() - before)
}

/// A key whose order is a hash of both sides, so that it is inconsistent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Odd(u32);

impl Ord for Odd {
    fn cmp(&self, other: &Self) -> Ordering {
        let mixed = (self.0 << 16 | other.0).wrapping_mul(0x9e37_79b1) >> 20;
        match mixed % 64 {
            0 => Ordering::Equal,
            odd if odd % 2 == 1 => Ordering::Less,
            _ => Ordering::Greater,
        }
    }
}

impl PartialOrd for Odd {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// With an inconsistent order, each message is removed once, and each node is freed.
#[test]
fn an_inconsistent_order_loses_nothing() {
    let ((), leaked) = bytes_of(|| {
        let mut core = Core::<u32, RbTree<Odd>>::new(3);
        let (mut there, mut removed) = (BTreeSet::new(), Vec::new());
        for n in 0..1_000 {
            core.push(Odd(n * 7_919 % 500), n).unwrap();
            there.insert(n);
            match n % 6 {
                0 => removed.extend(core.pop().map(|(n, _)| n)),
                1 => core.drain_filter(|m, _| m % 97 == n % 97, |n, _| removed.push(n)),
                _ => {}
            }
            removed.drain(..).for_each(|n| assert!(there.remove(&n), "{n} comes twice"));
            assert_eq!(core.len(), there.len());
        }
        assert!(there.len() > 100);
        while let Some((n, _)) = core.pop() {
            assert!(there.remove(&n), "{n} comes twice");
        }
        assert!(there.is_empty());
    });
    assert_eq!(leaked, 0);
}

/// After `reserve`, nodes are neither allocated nor freed, even in trees that keep few themselves.
#[test]
fn inv04_reserved_levels_need_no_memory() {
    for (spare, there, gone) in
        [(0, 0, 0), (0, 3, 1), (1, 0, 0), (2, 30, 0), (50, 70, 0), (50, 70, 40), (50, 70, 70)]
    {
        let mut core = Core::<u32, RbTree<u32>>::new(spare);
        (0..there).for_each(|n| core.push(1_000 + n, n).unwrap());
        (0..gone).for_each(|_| assert!(core.pop().is_some()));
        core.reserve(20).unwrap();
        let ((), calls) = calls(|| {
            for round in 0..3 {
                (0..30).for_each(|n| core.push(n % 20, n).unwrap());
                core.validate();
                while round > 0 && core.pop().is_some() {}
                core.drain_filter(|_, key| key < 20, |_, _| ());
                core.validate();
            }
            core.reserve(20).unwrap(); // they are there already
        });
        assert_eq!(calls, Calls::NONE, "{spare} {there} {gone}");
    }
}

#[test]
fn reserve_may_fail_and_keeps_what_it_got() {
    let mut core = Core::<u32, RbTree<u32>>::new(0);
    core.push(1, 1).unwrap();
    for impossible in [usize::MAX, usize::MAX - 1, 1 << 32] {
        let refused = (Err(AllocError::new()), Calls::NONE);
        assert_eq!(calls(|| core.reserve(impossible)), refused);
    }
    core.reserve(0).unwrap();
    let sent = refuse_after(3, || {
        assert_eq!(core.reserve(5), Err(AllocError::new()));
        (2..9).take_while(|&n| core.push(n, n).is_ok()).count()
    });
    assert_eq!(sent, 3);
    core.validate();
}
