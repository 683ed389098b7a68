//! Linearizability: the results of the operations of several threads on a table are those of the same
//! operations in some order, one after the other.
//!
//! Each operation lies between two tickets of one counter. The checker is that of Wing, Gong and Lowe.
#![cfg(not(offlock_model))]

use std::collections::BTreeMap;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::thread;
use std::time::Instant;

use radix_ctx::{CtxTable, GetRefError, Id, InsertRefused, LookupError, rcu};
use todc_utils::linearizability::WGLChecker;
use todc_utils::linearizability::history::{Action, History};
use todc_utils::specifications::Specification;

use testkit::rng::{self, Rng};

const THREADS: usize = 4;
/// The number of indexes of the table: few, so that they are used again.
const INDEXES: u32 = 4;

/// An operation and its result, which is `None` before its end.
#[derive(Clone, Copy, Debug)]
enum Op {
    Insert(u64, Option<Result<Id, ()>>),
    Lookup(Id, Option<Result<u64, LookupError>>),
    /// Reads through a counted reference.
    GetRef(Id, Option<Result<u64, LookupError>>),
    Remove(Id, Option<Result<(), LookupError>>),
}

struct Table;

impl Specification for Table {
    /// For each index the last generation, and the value of the context if it is live.
    type State = BTreeMap<u32, (u32, Option<u64>)>;
    type Operation = Op;

    fn init() -> Self::State {
        BTreeMap::new()
    }

    fn apply(op: &Op, state: &Self::State) -> (bool, Self::State) {
        let find = |id: Id| match state.get(&id.index()) {
            Some((generation, Some(value))) if *generation == id.generation() => Ok(*value),
            Some((generation, _)) if *generation >= id.generation() => Err(LookupError::Stale),
            _ => Err(LookupError::NotFound),
        };
        let mut next = state.clone();
        let valid = match *op {
            Op::Insert(value, Some(Ok(id))) => {
                let (generation, live) = state.get(&id.index()).copied().unwrap_or((0, None));
                next.insert(id.index(), (id.generation(), Some(value)));
                live.is_none() && id.generation() > generation
            }
            // Indexes of removed contexts that are not reclaimed yet are not vacant either.
            Op::Insert(_, Some(Err(()))) => true,
            Op::Lookup(id, Some(result)) | Op::GetRef(id, Some(result)) => result == find(id),
            Op::Remove(id, Some(result)) => {
                if result.is_ok() {
                    next.insert(id.index(), (id.generation(), None));
                }
                result == find(id).map(|_| ())
            }
            Op::Insert(_, None)
            | Op::Lookup(_, None)
            | Op::GetRef(_, None)
            | Op::Remove(_, None) => false,
        };
        (valid, next)
    }
}

type Actions = Vec<(usize, Action<Op>)>;

fn is_linearizable(actions: &Actions) -> bool {
    WGLChecker::<Table>::is_linearizable(History::from_actions(actions.clone()))
}

/// Ids that the threads share.
#[derive(Default)]
struct Board([AtomicU64; 6]);

impl Board {
    fn write(&self, rng: &mut Rng, id: Id) {
        self.0[rng.usize(..6)].store(id.to_bits(), Relaxed);
    }

    /// Returns one of the ids, or the next id of its index.
    fn read(&self, rng: &mut Rng) -> Option<Id> {
        let bits = self.0[rng.usize(..6)].load(Relaxed);
        let ahead = if rng.usize(..6) == 0 { 1 << 32 } else { 0 };
        Id::from_bits(bits).and_then(|id| Id::from_bits(id.to_bits() + ahead))
    }
}

/// Records the operations of several threads and their results.
fn record(seed: u64, each: usize) -> Actions {
    let table = CtxTable::builder().max_index(INDEXES - 1).build();
    let (board, tickets, start) = (Board::default(), AtomicUsize::new(0), Barrier::new(THREADS));
    let mut actions: Vec<(usize, (usize, Action<Op>))> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|me| {
                let (table, board, tickets, start) = (&table, &board, &tickets, &start);
                scope.spawn(move || {
                    let mut rng = rng::seeded(seed * 8 + me as u64);
                    let mut actions = Vec::with_capacity(2 * each);
                    start.wait();
                    for serial in 0..each {
                        let value = (me * each + serial) as u64;
                        let Some(op) = choose(&mut rng, board, value) else { continue };
                        let began = tickets.fetch_add(1, SeqCst);
                        let result = run(table, op);
                        let ended = tickets.fetch_add(1, SeqCst);
                        if let Op::Insert(_, Some(Ok(id))) = result {
                            board.write(&mut rng, id);
                        }
                        actions.push((began, (me, Action::Call(op))));
                        actions.push((ended, (me, Action::Response(result))));
                        if rng.usize(..8) == 0 {
                            rcu::poll();
                        }
                    }
                    actions
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    table.validate();
    actions.sort_by_key(|(ticket, _)| *ticket);
    actions.into_iter().map(|(_, action)| action).collect()
}

fn choose(rng: &mut Rng, board: &Board, value: u64) -> Option<Op> {
    Some(match rng.usize(..8) {
        0 | 1 => Op::Insert(value, None),
        2 | 3 => Op::Remove(board.read(rng)?, None),
        4 => Op::GetRef(board.read(rng)?, None),
        _ => Op::Lookup(board.read(rng)?, None),
    })
}

fn run(table: &CtxTable<u64>, op: Op) -> Op {
    match op {
        Op::Insert(value, _) => {
            let result = table.insert(value).map_err(|error| {
                assert!(matches!(error.reason, InsertRefused::Exhausted { .. }));
            });
            Op::Insert(value, Some(result))
        }
        Op::Lookup(id, _) => Op::Lookup(id, Some(table.with(id, |value| *value))),
        Op::GetRef(id, _) => {
            let result = table.get_ref(id).map(|context| *context).map_err(|error| match error {
                GetRefError::Lookup(error) => error,
                other => panic!("{other}"),
            });
            Op::GetRef(id, Some(result))
        }
        Op::Remove(id, _) => Op::Remove(id, Some(table.remove(id).map(|_| ()))),
    }
}

#[test]
fn inv14_results_are_those_of_a_sequence() {
    for seed in 0..60 {
        let actions = record(seed, 25);
        assert!(is_linearizable(&actions), "seed {seed}: {actions:#?}");
    }
}

#[test]
#[ignore = "stress: seconds of histories"]
fn stress_inv14_results_are_those_of_a_sequence() {
    let until = Instant::now() + testkit::stress::stress_time(5);
    let (mut seed, mut operations) = (1_000, 0);
    while Instant::now() < until {
        let actions = record(seed, 40);
        assert!(is_linearizable(&actions), "seed {seed}: {actions:#?}");
        seed += 1;
        operations += actions.len() / 2;
    }
    println!("{} histories, {operations} operations", seed - 1_000);
}

/// The checker rejects histories that no table can have.
#[test]
fn a_wrong_history_is_rejected() {
    let id = |generation: u64| Id::from_bits(generation << 32).unwrap();
    let insert = |id| Op::Insert(7, Some(Ok(id)));
    let one_by_one = |ops: &[Op]| -> Actions {
        let both =
            |(at, op): (usize, &Op)| [(at % 2, Action::Call(*op)), (at % 2, Action::Response(*op))];
        ops.iter().enumerate().flat_map(both).collect()
    };
    let removed = Op::Remove(id(1), Some(Ok(())));
    let found = |generation| Op::Lookup(id(generation), Some(Ok(7)));
    assert!(is_linearizable(&one_by_one(&[
        insert(id(1)),
        found(1),
        removed,
        insert(id(2)),
        found(2)
    ])));
    for wrong in [
        &[insert(id(1)), removed, removed][..],
        &[insert(id(1)), removed, found(1)],
        &[insert(id(1)), insert(id(2))],
        &[insert(id(1)), removed, insert(id(1))],
        &[insert(id(1)), removed, insert(id(2)), found(1)],
        &[found(1), insert(id(1))],
        &[insert(id(1)), Op::Lookup(id(1), Some(Err(LookupError::Stale)))],
        &[insert(id(1)), removed, Op::GetRef(id(1), Some(Err(LookupError::NotFound)))],
    ] {
        assert!(!is_linearizable(&one_by_one(wrong)), "{wrong:?}");
    }
    // Recorded histories, each with one changed result.
    let mut changed = 0;
    for seed in 0..20 {
        let mut actions = record(seed, 25);
        let last = actions.iter_mut().rev().find_map(|(_, action)| match action {
            Action::Response(Op::Lookup(_, Some(result)) | Op::GetRef(_, Some(result))) => {
                Some(result)
            }
            _ => None,
        });
        if let Some(result) = last {
            *result = Ok(u64::MAX);
            changed += 1;
            assert!(!is_linearizable(&actions));
        }
    }
    assert!(changed > 10);
}
