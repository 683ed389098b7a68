//! `offlock-nbd` against the clients people have, and against bad input.
//!
//! ```text
//! cargo test -p offlock-nbd --test clients              every trial
//! cargo test -p offlock-nbd --test clients -- uring/    those of one backend
//! ```
//!
//! `OFFLOCK_BACKEND=threads` leaves out the trials of the other backends, and keeps those of none.
//!
//! Each trial starts its own server on its own image in its own temporary directory. What a trial
//! needs (a client, root, a backend that the kernel may refuse) is looked for at run time: where
//! it is missing the trial is shown as ignored with the reason, or fails if `OFFLOCK_REQUIRE_ALL=1`.

mod activation;
mod bad_requests;
mod client;
mod crash;
mod defects;
mod disk;
mod durability;
mod extended;
mod extents;
mod folder;
mod handshake;
mod image;
mod images;
mod lab;
mod memory;
mod metrics;
mod need;
mod objects;
mod pressure;
mod process;
mod s3;
mod server;
mod startup;
mod tcp;
mod tearing;
mod tls;
mod tools;
mod trace;
mod volume;
mod write_back;

use std::process::ExitCode;
use std::thread;

use libtest_mimic::Trial;

use lab::Backend;

/// Trials mostly wait, for deadlines and for the disk: so many at a time for each CPU.
const TRIALS_PER_CPU: usize = 4;

fn main() -> ExitCode {
    let mut args = libtest_mimic::Arguments::from_args();
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    args.test_threads.get_or_insert(TRIALS_PER_CPU * cpus);
    let mut trials = Vec::new();
    // The long ones first, so that the last of them does not run alone at the end.
    trials.extend(pressure::trials());
    trials.extend(memory::trials());
    trials.extend(images::trials());
    trials.extend(crash::trials());
    trials.extend(durability::trials());
    trials.extend(defects::trials());
    trials.extend(disk::trials());
    trials.extend(tls::trials());
    trials.extend(volume::trials());
    trials.extend(objects::trials());
    trials.extend(tools::trials());
    trials.extend(extended::trials());
    trials.extend(extents::trials());
    trials.extend(handshake::trials());
    trials.extend(bad_requests::trials());
    trials.extend(startup::trials());
    trials.extend(activation::trials());
    trials.extend(process::trials());
    trials.extend(metrics::trials());
    trials.extend(folder::trials());
    trials.extend(write_back::trials());
    trials.extend(tcp::trials());
    trials.extend(tearing::trials());
    if let Ok(wanted) = std::env::var("OFFLOCK_BACKEND") {
        let of = |backend: &Backend, trial: &Trial| {
            trial.name().split_once('/').is_some_and(|(first, _)| first == backend.name())
        };
        let (mine, others): (Vec<_>, Vec<_>) =
            Backend::ALL.into_iter().partition(|backend| backend.name() == wanted);
        assert!(mine.len() == 1, "OFFLOCK_BACKEND={wanted}: no such backend");
        trials.retain(|trial| !others.iter().any(|other| of(other, trial)));
    }
    libtest_mimic::run(&args, trials).exit_code()
}
