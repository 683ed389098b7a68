//! The age and the bytes of the overflow list.

use super::*;

/// Objects in the overflow list have an age, and keep it when they move into a bag. If the age
/// was taken with earlier objects, it counts from the first call of
/// `pending`.
#[test]
fn the_overflow_has_an_age() {
    // SAFETY: `free` is never called, because this test frees no object.
    let head = || unsafe { RetireHead::new(|_| ()) };
    let heads = [head(), head()];
    let bags = Bags::new();
    let mut list = Segment::EMPTY;
    list.push(NonNull::from(&heads[0]), usize::MAX / 2);
    list.since -= 1_000_000_000;
    bags.push_overflow(&mut list);
    list.push(NonNull::from(&heads[1]), usize::MAX);
    bags.push_overflow(&mut list);
    let pending = bags.pending();
    assert_eq!((pending.objects, pending.bytes), (2, u64::MAX));
    assert!(pending.oldest >= Some(Duration::from_secs(1)), "{pending:?}");
    bags.overflow_since.store(UNKNOWN_AGE, Relaxed);
    assert!(bags.pending().oldest.is_some());
    let taken = Bag::new().try_with(|lists| {
        bags.take_overflow(lists);
        (lists.filling.objects, lists.filling.since <= coarse_clock())
    });
    assert_eq!((taken, bags.pending().oldest), (Some((2, true)), None));
    let head = head();
    list.push(NonNull::from(&head), 1);
    list.since -= 1_000_000_000;
    bags.push_overflow(&mut list);
    let since = Bag::new().try_with(|lists| {
        bags.take_overflow(lists);
        lists.filling.since
    });
    assert!(since.unwrap() + 1_000_000_000 <= coarse_clock());
}

/// One list moved to the front of another waits since the older one, and for the later target.
#[test]
fn lists_that_are_joined_keep_the_older_age() {
    // SAFETY: `free` is never called, because this test frees no object.
    let head = || unsafe { RetireHead::new(|_| ()) };
    let heads = [head(), head()];
    for (since, others) in [(3, 7), (7, 3)] {
        let (mut list, mut other) = (Segment::EMPTY, Segment::EMPTY);
        list.push(NonNull::from(&heads[0]), 10);
        other.push(NonNull::from(&heads[1]), 20);
        (list.since, list.target, other.since, other.target) = (since, since, others, others);
        list.splice(&mut other);
        assert_eq!((list.since, list.target, list.objects, list.bytes), (3, 7, 2, 30));
        assert!(other.is_empty());
    }
}
