//! The engine on a simulated device, and the device itself.
#![cfg(not(offlock_model))]

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use aio_reap::{BackendKind, Engine, ReapMode};
use aio_reap_test::Build;
use aio_reap_test::sim::{ClosedLoop, Costs, Faults, Model, Service, Sim, Workload};

const FREE: Costs = Costs { submission: 0, request: 0, peek: 0, completion: 0, poll: 0, wake: 0 };
/// A model with a fault every few requests.
const FAULTS: Faults = Faults {
    busy: 100_000,
    partial: 200_000,
    refused: 50_000,
    failed: 20_000,
    again: 100_000,
    short: 200_000,
};
const SERVICES: [Service; 3] = [
    Service::Fixed(50_000),
    Service::Exponential(50_000),
    Service::Bursty { fast: 10_000, slow: 90_000, run: 100 },
];
const MODES: [ReapMode; 2] = [ReapMode::OnTurn, ReapMode::AfterSubmit];

fn workload() -> Workload {
    let sizes = vec![(3, 4096), (1, 65_536)];
    Workload { queues: 4, depth: 8, sizes, ask: 500, done: 200, think: 1_000 }
}

fn engines(sim: &Sim, count: usize, mode: ReapMode) -> Vec<Engine> {
    let builder = Engine::builder().depth(16).reap_mode(mode);
    (0..count).map(|_| builder.clone().build_sim(sim).unwrap()).collect()
}

/// Every request completes once, and the engines' counters agree.
fn run_to_the_end(model: Model, seed: u64, count: usize, mode: ReapMode, requests: u64) -> Sim {
    let sim = Sim::new(model, seed);
    let engines = engines(&sim, count, mode);
    let mut work = ClosedLoop::new(&sim, &engines, workload(), seed ^ 1).unwrap();
    work.run(requests).unwrap();
    work.drain().unwrap();
    let figures = work.figures();
    assert_eq!((work.outstanding(), figures.twice), (0, 0), "lost or repeated, seed {seed}");
    assert_eq!(figures.requests, figures.latency.len());
    assert_eq!(sim.in_flight(), 0);
    let mut sum = engines[0].stats();
    engines[1..].iter().for_each(|engine| sum.merge(&engine.stats()));
    assert_eq!((sum.accepted, sum.completed), (figures.requests, figures.requests));
    assert_eq!(sum.stray, 0);
    assert_eq!(sum.reap_sizes.sum(), sum.submitted);
    for engine in &engines {
        assert!(engine.validate().is_idle());
        assert!(engine.stats().max_in_flight <= 16);
    }
    sim
}

#[test]
fn same_seed_gives_the_same_log_and_another_seed_another() {
    for service in SERVICES {
        for mode in MODES {
            let model = Model { service, faults: FAULTS, inline: 50_000, ..Model::default() };
            let run = |seed| {
                let sim = run_to_the_end(model, seed, 2, mode, 2_000);
                (sim.now(), sim.fingerprint())
            };
            let first = run(7);
            assert_eq!(first, run(7), "{service:?}, {mode:?}");
            assert_ne!(first, run(8), "{service:?}, {mode:?}");
        }
    }
}

/// A device that is always busy serves at its rate, and latencies, counts and the clock obey Little's law.
#[test]
fn rates_and_latencies_are_those_of_the_model() {
    for (service, tolerance) in SERVICES.into_iter().zip([0.001, 0.02, 0.1]) {
        let sim = Sim::new(Model { servers: 4, service, costs: FREE, ..Model::default() }, 11);
        let engines = engines(&sim, 1, ReapMode::AfterSubmit);
        let work = Workload { ask: 0, done: 0, think: 0, ..workload() };
        let mut work = ClosedLoop::new(&sim, &engines, work, 4).unwrap();
        work.run(2_000).unwrap();
        work.reset();
        work.run(100_000).unwrap();
        let figures = work.figures();
        let rate = figures.requests as f64 / figures.nanos as f64;
        let (servers, inside) = (rate * service.mean() as f64, rate * figures.latency.mean());
        assert!((servers / 4.0 - 1.0).abs() < tolerance, "{service:?}: {servers} servers");
        assert!((31.0..33.0).contains(&inside), "{service:?}: {inside} of 32");
    }
}

#[test]
fn costs_and_bytes_add_up_to_the_nanosecond() {
    let costs = Costs {
        submission: 1_000_000,
        request: 100_000,
        peek: 10_000,
        completion: 1_000,
        poll: 100,
        wake: 10,
    };
    let service = Service::Fixed(100_000_000);
    let model = Model { servers: 2, service, costs, picos_per_byte: 2_000, ..Model::default() };
    let sim = Sim::new(model, 0);
    let engine = Engine::builder().build_sim(&sim).unwrap();
    assert_eq!(engine.backend(), BackendKind::External);
    let file = engine.attach(tempfile::tempfile().unwrap()).unwrap();
    let plug = engine.plug();
    let first = engine.read(&file, vec![7; 4096], 0).submit().unwrap();
    let second = engine.nop().submit().unwrap();
    assert_eq!(sim.now(), 0);
    drop(plug);
    assert_eq!((sim.now(), sim.in_flight(), sim.visible()), (1_210_000, 2, 0));
    second.wait().0.unwrap();
    // A server begins it at 1,200,000. The polls before the sleep do not delay it.
    assert_eq!(sim.now(), 101_200_000 + 10 + 10_000 + 1_000);
    let (result, buf) = first.wait();
    assert_eq!((result.unwrap(), buf), (4096, vec![7; 4096])); // no data moves
    // From the submission to the reaps: 1,000,000 and 1,100,000 were the times of the two.
    let (nop, read) = (101_210_010 - 1_000_000, sim.now() - 1_000_000);
    assert!(sim.mean_in_device() > nop / 2 && sim.mean_in_device() < read);
}

#[test]
fn cancelling_ends_what_no_server_has_taken_up() {
    let model = Model { servers: 1, service: Service::Fixed(1_000_000), ..Model::default() };
    let sim = Sim::new(model, 0);
    let engine = Engine::builder().build_sim(&sim).unwrap();
    let plug = engine.plug();
    let (first, second) = (engine.nop().submit().unwrap(), engine.nop().submit().unwrap());
    drop(plug);
    assert!(first.cancel() && second.cancel());
    let error = second.wait().0.unwrap_err();
    assert_eq!(error.errno(), libc::ECANCELED);
    assert!(sim.now() < 1_000_000);
    first.wait().0.unwrap();
    assert!(sim.now() >= 1_000_000);
}

#[test]
fn retries_without_anything_in_flight_pass_virtual_time() {
    let faults = Faults { busy: 900_000, ..Faults::default() };
    let sim = Sim::new(Model { faults, ..Model::default() }, 9);
    let engine = Engine::builder().build_sim(&sim).unwrap();
    for _ in 0..100 {
        engine.nop().submit().unwrap().wait().0.unwrap();
    }
    let busy = engine.stats().busy;
    assert!(busy > 300, "{busy}");
    // The first retry comes after 100 us, and each later one after a longer delay.
    assert!(sim.now() > busy * 100_000, "{} ns", sim.now());
}

/// Timeouts and deadlines take no real time, and pass at the same virtual time in each run.
#[test]
fn inv09_deadlines_come_in_virtual_time() {
    const HOUR: Duration = Duration::from_secs(3600);
    let run = |mode| {
        let service = Service::Exponential(24 * 3_600_000_000_000);
        let sim = Sim::new(Model { servers: 1, service, ..Model::default() }, 6);
        let engine = Engine::builder().reap_mode(mode).build_sim(&sim).unwrap();
        let started = Instant::now();
        let hours = |count: u32| {
            let passed = sim.now() / 3_600_000_000_000;
            assert_eq!(passed, count.into(), "{mode:?}");
        };
        let slow = engine.nop().submit().unwrap();
        for passed in 1..=2 {
            assert_eq!(engine.wait(Some(HOUR)).unwrap().delivered, 0);
            hours(passed);
        }
        // No server has begun it, so it can be cancelled. Only the engine waits for it.
        let late = engine.nop().cancel_at(sim.instant() + HOUR).submit().unwrap();
        let error = late.wait().0.unwrap_err();
        assert_eq!(error.errno(), libc::ETIMEDOUT);
        hours(3);
        slow.wait().0.unwrap();
        assert!(started.elapsed() < Duration::from_secs(60), "{mode:?}");
        (sim.now(), sim.fingerprint())
    };
    for mode in MODES {
        assert_eq!(run(mode), run(mode), "{mode:?}");
    }
}

#[test]
fn futures_are_woken_in_virtual_time() {
    let sim = Sim::new(Model::default(), 2);
    let engine = Engine::builder().build_sim(&sim).unwrap();
    let all = async {
        for _ in 0..100 {
            engine.nop().submit().unwrap().await.0.unwrap();
        }
    };
    engine.block_on(all).unwrap();
    assert!(sim.now() > 100 * 10_000, "{} ns", sim.now());
}

/// The drop of the engine delivers the requests in flight, and the device drops them.
#[test]
fn inv14_dropping_the_engine_passes_the_time_that_it_takes() {
    let model = Model { service: Service::Fixed(5_000_000), ..Model::default() };
    let sim = Sim::new(model, 0);
    let (first, second) =
        (Engine::builder().build_sim(&sim).unwrap(), Engine::builder().build_sim(&sim).unwrap());
    let done = Rc::new(RefCell::new(Vec::new()));
    for (name, engine) in ["first", "second"].into_iter().zip([&first, &second]) {
        let done = Rc::clone(&done);
        engine
            .nop()
            .callback(move |result, ()| done.borrow_mut().push((name, result.is_ok())))
            .unwrap();
    }
    assert_eq!((sim.in_flight(), sim.visible()), (2, 0));
    drop(first);
    assert_eq!(*done.borrow(), [("first", true)]);
    assert!(sim.now() >= 5_000_000);
    assert_eq!((sim.in_flight(), sim.visible()), (1, 1));
    drop(second);
    assert_eq!(*done.borrow(), [("first", true), ("second", true)]);
}
