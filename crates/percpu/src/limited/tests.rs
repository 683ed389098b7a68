//! The shares and the pool against a model that is one number.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::fork::child::in_child;

/// The numbers of the page's invariants; nobody else may be using the counter.
fn validate(counter: &LimitedCounter) {
    let totals = counter.pool.0.lock();
    let (mut room, mut used) = (totals.room, totals.used);
    for word in counter.words.iter().flat_map(Words::iter) {
        let word = word.load(Ordering::Relaxed);
        let share = Share::from_word(word);
        assert!(u64::from(share.room) + u64::from(share.used) <= u64::from(u32::MAX), "{share:?}");
        assert!(totals.over == 0 || word == 0, "a share beside over-use");
        room += u64::from(share.room);
        used += u64::from(share.used);
    }
    assert_eq!(
        u128::from(room) + u128::from(used),
        u128::from(totals.limit) + u128::from(totals.over)
    );
    assert!(totals.over == 0 || room == 0, "room beside over-use");
}

#[derive(Clone, Debug)]
enum Step {
    Add(u32, u64),
    Sub(u32, u64),
    Value,
    Limit(u64),
}

/// Mostly small, some around 2^32 and some beyond any sum.
fn amount() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => 0_u64..8,
        3 => 0_u64..2_000,
        1 => u64::from(u32::MAX) - 2..=u64::from(u32::MAX) + 2,
        1 => any::<u64>(),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (any::<u32>(), amount()).prop_map(|(cpu, n)| Step::Add(cpu, n)),
        5 => (any::<u32>(), amount()).prop_map(|(cpu, n)| Step::Sub(cpu, n)),
        1 => Just(Step::Value),
        1 => amount().prop_map(Step::Limit),
    ]
}

proptest! {
    #[test]
    fn inv05_each_answer_is_that_of_one_number(
        limit in amount(),
        without_words in prop::bool::weighted(0.1),
        steps in vec(step(), 0..120),
    ) {
        let words = if without_words { None } else { Some(Words::new().unwrap()) };
        let counter = LimitedCounter::with_words(limit, words);
        let (mut value, mut limit) = (0_u64, limit);
        let on = |cpu: u32| move || CpuId::new(cpu % cpu::possible() as u32);
        for step in steps {
            match step {
                Step::Add(cpu, n) => {
                    let fits = n == 0 || value.checked_add(n).is_some_and(|sum| sum <= limit);
                    let want = if fits { Ok(()) } else { Err(LimitError::LimitReached) };
                    prop_assert_eq!(counter.turn_on(on(cpu), Turn::RoomIntoUse, n), want);
                    value += if fits { n } else { 0 };
                }
                Step::Sub(cpu, n) => {
                    let there = n <= value;
                    let want = if there { Ok(()) } else { Err(LimitError::BelowZero) };
                    prop_assert_eq!(counter.turn_on(on(cpu), Turn::UseIntoRoom, n), want);
                    value -= if there { n } else { 0 };
                }
                Step::Value => prop_assert_eq!(counter.value(), Ok(value)),
                Step::Limit(new) => {
                    counter.set_limit(new).unwrap();
                    limit = new;
                }
            }
            validate(&counter);
        }
        prop_assert_eq!((counter.value(), counter.limit()), (Ok(value), Ok(limit)));
    }
}

/// Far from the limit the pool is asked once in some hundred operations.
#[test]
fn a_share_lasts_a_while() {
    let counter = LimitedCounter::new(u64::MAX);
    let mut visits = 0;
    let on_cpu_0 = || CpuId::new(0);
    for _ in 0..10_000 {
        let before = counter.pool.0.lock().room;
        counter.turn_on(on_cpu_0, Turn::RoomIntoUse, 1).unwrap();
        visits += u64::from(counter.pool.0.lock().room != before);
    }
    assert!(visits <= 10_000 / OPERATIONS + 1, "{visits}");
    assert_eq!(counter.value(), Ok(10_000));
}

/// The child of a fork cannot wait for a mutex whose holder it may not have.
#[test]
fn inv15_a_child_says_forked_where_it_would_wait() {
    let counter = LimitedCounter::new(100);
    counter.try_add(60).unwrap();
    let forked = LimitError::Forked(Forked::new());
    let held = counter.pool.0.lock();
    assert!(in_child(|| {
        counter.try_add(41) == Err(forked)
            && counter.try_sub(61) == Err(forked)
            && counter.value() == Err(forked)
            && counter.set_limit(1) == Err(forked)
    }));
    drop(held);
    assert!(in_child(|| {
        counter.try_add(41) == Err(LimitError::LimitReached)
            && counter.try_sub(1) == Ok(())
            && counter.try_add(41) == Ok(())
            && counter.value() == Ok(100)
    }));
    assert_eq!(counter.value(), Ok(60), "the parent's own");
}

#[test]
fn errors_have_their_numbers() {
    let all = [LimitError::LimitReached, LimitError::BelowZero, Forked::new().into()];
    assert_eq!(all.map(|e| e.errno()), [libc::EAGAIN, libc::EINVAL, libc::EOWNERDEAD]);
    assert_eq!(io::Error::from(all[0]).kind(), io::ErrorKind::WouldBlock);
    assert!(all.iter().all(|e| !e.to_string().is_empty()));
}

#[expect(dead_code, reason = "compiling is the test")]
fn marker() {
    fn send_and_sync<T: Send + Sync>() {}
    send_and_sync::<LimitedCounter>();
    send_and_sync::<LimitError>();
}
