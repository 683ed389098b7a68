//! B9: a page that is there, and the page cache of the kernel.

use std::hint::black_box;
use std::io::Write;
use std::os::unix::fs::FileExt;

use bufcache::{Cache, FileDevice};
use harness::{Case, Group, Plan, Report};

use crate::keys::zipf;
use crate::ours::OPEN;
use crate::pages::{PAGE, fill, place, word};

const PAGES: usize = 1 << 12;
const READS: usize = 1 << 16;

/// Reads along the keys, each time another way.
fn case<'a>(name: &str, keys: &'a [u32], read: impl Fn(u64, usize) + Sync + Copy + 'a) -> Case<'a> {
    Case::new(name, 1, move |_| {
        move |count| {
            let number = u64::from(keys[count as usize & (READS - 1)]);
            read(number, place(number));
        }
    })
}

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let mut file = tempfile::tempfile().expect("room for a file of 16 MiB");
    let mut page = [0; PAGE];
    for number in 0..PAGES as u64 {
        fill(number, &mut page);
        file.write_all(&page).expect("room for a file of 16 MiB");
    }
    let cache = Cache::new(2 * PAGES * PAGE).expect(OPEN);
    let own = FileDevice::new(file.try_clone().expect("a descriptor")).expect("a file");
    let device = &cache.attach(own).expect(OPEN);
    for number in 0..PAGES as u64 {
        assert_eq!(word(&device.get(number).expect("a file that can be read"), 8), number);
    }
    let (file, keys) = (&file, &zipf(PAGES, 0.99, READS)[..]);
    let offset = |number: u64| number * PAGE as u64;
    let copied = |number: u64| {
        let mut page = [0_u8; PAGE];
        page.copy_from_slice(&device.get(number).expect(OPEN));
        black_box(&page);
    };
    let rounds = Group::new("a page of a file, cached")
        .case(case("bufcache 8 B", keys, |number, at| {
            black_box(word(&device.get(number).expect(OPEN), at));
        }))
        .case(case("bufcache copy 4 KiB", keys, |number, _| copied(number)))
        .case(case("pread 8 B", keys, |number, at| {
            let mut bytes = [0; 8];
            file.read_exact_at(&mut bytes, offset(number) + at as u64).expect("it is there");
            black_box(bytes);
        }))
        .case(case("pread 4 KiB", keys, |number, _| {
            let mut page = [0; PAGE];
            file.read_exact_at(&mut page, offset(number)).expect("it is there");
            black_box(&page);
        }))
        .run(plan);
    report.show(&rounds);
    report.against(&rounds, "bufcache 8 B", 1, &["pread 8 B", "pread 4 KiB"]);
    report.against(&rounds, "bufcache copy 4 KiB", 1, &["pread 4 KiB"]);
    let over = |ours: &str| rounds.time_ratio(&format!("{ours}/1"), "pread 4 KiB/1");
    report.record("B9.guard8_vs_pread", over("bufcache 8 B"));
    report.record("B9.copy4k_vs_pread", over("bufcache copy 4 KiB"));
}
