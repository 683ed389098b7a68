//! The program that runs under QEMU: one structure, one operation over and over, on every thread.

use std::error::Error;
use std::sync::Barrier;
use std::thread;

use crate::structures;

/// The markers that `coherence.c` looks for.
const START: libc::c_long = 0x5eed01;
const DONE: libc::c_long = 0x5eed02;
const STOP: libc::c_long = 0x5eed03;

/// Operations before the recording starts: a peer registers its thread, a cache fills.
const WARM_UP: usize = 64;

/// `census <structure> <threads> <operations>`; what `cargo bench` adds after it is ignored.
pub(crate) fn run(words: &[String]) -> Result<(), Box<dyn Error>> {
    let [structure, threads, operations, ..] = words else {
        return Err("usage: census <structure> <threads> <operations>".into());
    };
    let structure = structures::find(structure).ok_or("there is no such structure")?;
    let (threads, operations): (usize, usize) = (threads.parse()?, operations.parse()?);
    offlock_sync::virtual_cpu::fix(threads);

    let shared = (structure.make)();
    let barrier = Barrier::new(threads);
    thread::scope(|scope| {
        for thread in 0..threads {
            let (shared, barrier) = (&shared, &barrier);
            scope.spawn(move || {
                let cpu = u32::try_from(thread).expect("far fewer threads");
                offlock_sync::virtual_cpu::set_current(offlock_percpu::CpuId::new(cpu));
                let mut operation = shared(thread);
                for _ in 0..WARM_UP {
                    operation();
                }
                barrier.wait();
                mark(START);
                for _ in 0..operations {
                    operation();
                    mark(DONE);
                }
                mark(STOP);
                barrier.wait(); // no thread's exit is in the record of another
            });
        }
    });
    Ok(())
}

fn mark(marker: libc::c_long) {
    // SAFETY: the kernel has no such system call: it does nothing and reports ENOSYS.
    unsafe { libc::syscall(marker) };
}
