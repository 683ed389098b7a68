//! B13: gets on a healthy device beside one that answers nothing, which has readers, writers and dirty blocks.

use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use bufcache::{BlockDevice, Cache, Device};
use harness::timed::on_one_cpu;
use harness::{Plan, Report, median};

use crate::ours::{MANY, OPEN, Slow, times};
use crate::pages::PAGE;

const ROOM: usize = 4096;
/// Gets of a window, of twice as many blocks as there is room for.
const GETS: u64 = 20_000;

/// Whether the device answers, and the calls that wait for it.
#[derive(Clone, Default)]
struct Hung(Arc<(Mutex<bool>, Condvar)>);

impl Hung {
    fn wait(&self) {
        let (answers, changed) = &*self.0;
        let answers = answers.lock().expect("no panic under the lock");
        drop(changed.wait_while(answers, |answers| !*answers).expect("no panic under the lock"));
    }

    fn answer(&self) {
        let (answers, changed) = &*self.0;
        *answers.lock().expect("no panic under the lock") = true;
        changed.notify_all();
    }
}

impl BlockDevice for Hung {
    fn len(&self) -> u64 {
        MANY
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.wait();
        Ok(buf.len())
    }

    fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
        self.wait();
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.wait();
        Ok(())
    }
}

fn cache(read: Duration) -> (Cache, Device) {
    let cache = Cache::new(ROOM * PAGE).expect(OPEN);
    let device = cache.attach(Slow(read)).expect(OPEN);
    (cache, device)
}

/// The p99 of a get.
fn gets(device: &Device) -> f64 {
    times(device, (0..GETS).map(|count| count * 37 % (2 * ROOM as u64)), 99.0)
}

/// The target is about a device as fast as they come. With one that takes no time the figure is that of the evictor,
/// which passes by the dirty blocks of the other device.
pub(crate) fn run(plan: &Plan, report: &mut Report) {
    beside_hung(plan, Duration::ZERO);
    let ratio = beside_hung(plan, Duration::from_micros(10));
    report.record("B13.get_beside_hung_device", ratio);
}

/// Returns the p99 of gets beside a hung device over the p99 without it. Each read takes `read`.
fn beside_hung(plan: &Plan, read: Duration) -> Option<f64> {
    let (_alone_cache, alone) = cache(read);
    let (beside_cache, beside) = cache(read);
    let hung = Hung::default();
    let disk = beside_cache.attach(hung.clone()).expect(OPEN);
    let ratios: Vec<[f64; 3]> = thread::scope(|scope| {
        for reader in 0..2 {
            let disk = &disk;
            scope.spawn(move || drop(disk.get(1 << 20 | reader)));
        }
        // Until it has its share of the dirty blocks, and is refused more or waits for one that is written.
        scope.spawn(|| (0..ROOM as u64).try_for_each(|block| disk.create(block).map(drop)));
        gets(&beside); // whose device wants buffers from here on
        thread::sleep(2 * plan.window);
        let round = |_| {
            let [alone, beside] = on_one_cpu(|| [&alone, &beside].map(gets));
            [alone, beside, beside / alone]
        };
        let ratios = (0..plan.rounds.min(15)).map(round).collect();
        hung.answer();
        ratios
    });
    let of = |at: usize| median(&ratios.iter().map(|round| round[at]).collect::<Vec<_>>());
    let [alone_ns, beside_ns] = [0, 1].map(|at| of(at).unwrap_or(f64::NAN));
    println!(
        "- reads of {read:?}: p99 {alone_ns:.0} ns, beside a device that hangs {beside_ns:.0}"
    );
    println!("- bufcache: {}", beside_cache.stats());
    of(2)
}
