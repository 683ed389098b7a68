//! The recordings of open files, replayed on `percpu-list` as the kernel ran them: each file added and
//! removed on its CPU.

use std::collections::BTreeSet;

use percpu::CpuId;
use percpu_list::{PerCpuList, Stats};
use recordings::files::{Action, BUILD16, CPUS, DBENCH64, Event, Recording};

/// Files that are made by `add` and destroyed by `remove`.
struct Files<'a> {
    list: &'a PerCpuList<u32>,
    entries: Vec<Option<percpu_list::Entry<&'a PerCpuList<u32>>>>,
}

impl Files<'_> {
    fn add(&mut self, file: u32, cpu: CpuId) {
        let entry = self.list.insert_on(cpu, file).unwrap();
        assert!(self.entries[file as usize].replace(entry).is_none());
    }

    fn remove(&mut self, file: u32, cpu: CpuId) {
        let entry = self.entries[file as usize].take().expect("it is open");
        assert!(matches!(entry.remove_on(cpu), Ok(true)));
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
    let mut model = BTreeSet::new();
    let check = |list: &Files<'_>, model: &BTreeSet<u32>, at| {
        assert_eq!(list.open(), *model, "{}, before event {at}", recording.name);
    };
    for (at, event) in events.iter().enumerate() {
        let cpu = CpuId::new(event.cpu.into());
        match event.action {
            Action::Add => {
                assert!(model.insert(event.file));
                list.add(event.file, cpu);
            }
            Action::Remove => {
                assert!(model.remove(&event.file));
                list.remove(event.file, cpu);
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
    assert_eq!(stats.contended, 0);
}

/// False where the machine has fewer CPUs than the recorded one, whose numbers are refused here.
fn has_the_cpus() -> bool {
    let there = percpu::topology().capacity();
    if there < CPUS {
        println!("not replayed: recorded on {CPUS} CPUs, and this machine has {there}");
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
