//! The recordings of open files, replayed on `percpu-list` as the kernel ran them: each file added and
//! removed by a thread on its CPU.

use std::collections::BTreeSet;

use percpu_list::{PerCpuList, Stats};
use recordings::files::{Action, BUILD16, CPUS, DBENCH64, Event, Recording};
use testkit::pin::{allowed_cpus, pin_to};

/// Files that are made by `add` and destroyed by `remove`.
struct Files<'a> {
    list: &'a PerCpuList<u32>,
    entries: Vec<Option<percpu_list::Entry<u32>>>,
}

impl Files<'_> {
    fn add(&mut self, file: u32) {
        let entry = self.list.insert(file).unwrap();
        assert!(self.entries[file as usize].replace(entry).is_none());
    }

    fn remove(&mut self, file: u32) {
        let entry = self.entries[file as usize].take().expect("it is open");
        assert!(matches!(entry.remove(), Ok(true)));
    }

    fn open(&self) -> BTreeSet<u32> {
        let files = self.list.lock_all().unwrap();
        let open: BTreeSet<u32> = files.iter().copied().collect();
        assert_eq!(open.len(), files.len(), "a file is there twice");
        open
    }

    fn stats(&self) -> Stats {
        self.list.validate();
        self.list.stats()
    }
}

/// Replays the events on the list and on a set of open files, which must always agree.
fn replay(recording: &Recording, events: &[Event], mut list: Files<'_>) {
    let (mut model, cpus, mut here) = (BTreeSet::new(), allowed_cpus(), usize::MAX);
    let check = |list: &Files<'_>, model: &BTreeSet<u32>, at| {
        assert_eq!(list.open(), *model, "{}, before event {at}", recording.name);
    };
    for (at, event) in events.iter().enumerate() {
        let cpu = cpus[usize::from(event.cpu)];
        if cpu != here {
            pin_to(&[cpu]);
            here = cpu;
        }
        match event.action {
            Action::Add => {
                assert!(model.insert(event.file));
                list.add(event.file);
            }
            Action::Remove => {
                assert!(model.remove(&event.file));
                list.remove(event.file);
            }
        }
        if at % 997 == 0 {
            check(&list, &model, at + 1);
        }
    }
    check(&list, &model, events.len());

    let stats = list.stats();
    assert_eq!(stats.adds, events.len() as u64 - recording.removals);
    assert_eq!(stats.removals, recording.removals);
    assert_eq!(stats.live(), model.len() as u64);
    assert_eq!(stats.cpu_hits, recording.cpu_hits, "{}", recording.name);
    assert!(stats.cpu_hits <= stats.node_hits && stats.node_hits <= stats.removals);
}

/// False where the machine has fewer CPUs than the recorded one, whose numbers are refused here.
fn has_the_cpus() -> bool {
    let there = allowed_cpus().len();
    if there < CPUS {
        println!("not replayed: recorded on {CPUS} CPUs, and this process has {there}");
    }
    there >= CPUS
}

#[test]
fn recorded_files_on_the_list() {
    if !has_the_cpus() {
        return;
    }
    for recording in [DBENCH64, BUILD16] {
        let events = recording.load().unwrap();
        let list = PerCpuList::new();
        let count = events.iter().map(|event| event.file + 1).max().unwrap();
        let entries = (0..count).map(|_| None).collect();
        replay(&recording, &events, Files { list: &list, entries });
    }
}
