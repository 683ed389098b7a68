//! Some seconds of random input for the model, on every real backend and on simulated devices, and of calls
//! from many threads.
//!
//! ```sh
//! cargo test --release -p aio-reap --test stress -- --ignored --test-threads 1
//! ```
//!
//! `OFFLOCK_STRESS_SECONDS` (2) is the time for each backend.
#![cfg(not(offlock_model))]

mod common;
#[path = "common/counted.rs"]
mod counted;
mod model;
#[path = "common/readable.rs"]
mod readable;
#[path = "common/writer.rs"]
mod writer;

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use aio_reap::Engine;
use common::{engines, small};
use model::Device;
use testkit::block_on;
use testkit::rng::seeded;
use testkit::stress::{keep_running, stress_time};
use writer::Writer;

/// The least number of steps, or of requests of each thread, also on a busy machine.
const ENOUGH: usize = 100;

/// Runs random inputs on devices for a while.
fn on_devices(name: &str, device: impl Fn(u64) -> Device) {
    let (until, mut random, mut steps) = (Instant::now() + stress_time(2), seeded(7), 0);
    while keep_running(until, || steps > ENOUGH) {
        let input: Vec<u8> = (0..4_000).map(|_| random.u8(..)).collect();
        steps +=
            model::run_on(device(random.u64(..)), env!("CARGO_TARGET_TMPDIR").as_ref(), &input);
    }
    println!("{name}: {steps} steps");
}

#[test]
#[ignore = "takes seconds per backend"]
fn stress_inv15_every_backend_does_what_the_model_does() {
    for engine in engines(small()) {
        on_devices(&engine.backend().to_string(), |_| Device::Kernel(engine.backend()));
    }
}

#[test]
#[ignore = "takes seconds"]
fn stress_inv15_simulated_devices_do_what_the_model_does() {
    on_devices("simulated", model::faulty);
}

#[test]
#[ignore = "takes seconds per backend"]
fn stress_inv06_threads_share_an_engine() {
    for engine in engines(Engine::builder().depth(8).capacity(64)) {
        let writer = Writer::new(&engine);
        let until = Instant::now() + stress_time(2);
        let made: usize = thread::scope(|scope| {
            let clients: Vec<_> = (0..4)
                .map(|nr| {
                    let writer = writer.clone();
                    let work = move |made| keep_running(until, || made > ENOUGH);
                    scope.spawn(move || block_on(writer.run(nr, work)))
                })
                .collect();
            let freed = Arc::clone(&writer.freed);
            drop(writer);
            engine.serve().unwrap();
            let made = clients.into_iter().map(|client| client.join().unwrap()).sum();
            assert_eq!(freed.load(std::sync::atomic::Ordering::Relaxed), made as u64, "buffers");
            made
        });
        assert!(engine.validate().is_idle());
        assert_eq!(format!("{:?}", engine.remote()), "Remote { calls: 0, capacity: 64 }");
        let stats = engine.stats();
        assert_eq!((stats.stray, stats.completed), (0, stats.accepted));
        println!("{}: {made} requests, {stats}", engine.backend());
    }
}
