//! Open files: every allocation and release of a `struct file`, with its CPU.

use std::io;

use crate::packed::load;

/// One of the two recordings.
#[derive(Clone, Copy, Debug)]
pub struct Recording {
    /// A word: what was running.
    pub name: &'static str,
    /// The number of files that were released.
    pub removals: u64,
    /// The number of these that were released on the CPU that had allocated them.
    pub cpu_hits: u64,
    packed: &'static [u8],
}

/// 64 clients of dbench.
pub const DBENCH64: Recording = Recording {
    name: "dbench64",
    removals: 64_933,
    cpu_hits: 64_237,
    packed: include_bytes!("../files-dbench64.bin.gz"),
};

/// A cargo build, 16 at a time.
pub const BUILD16: Recording = Recording {
    name: "build16",
    removals: 47_053,
    cpu_hits: 45_546,
    packed: include_bytes!("../files-build16.bin.gz"),
};

/// The number of CPUs of the recorded machine.
pub const CPUS: usize = 2;

/// An event of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The number of the file: dense, from 0, and used again after a release.
    pub file: u32,
    /// The number of the task.
    pub task: u16,
    /// The CPU, 0 or 1.
    pub cpu: u8,
    /// The kind of the event.
    pub action: Action,
}

/// The kinds of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The file was opened, and its object allocated.
    Add,
    /// The file's last descriptor was closed, and its object released.
    Remove,
}

impl Recording {
    /// All events, in the order in which they happened.
    ///
    /// # Errors
    ///
    /// If the file in the repository is damaged.
    pub fn load(&self) -> io::Result<Vec<Event>> {
        load(self.packed, b"FILELST1", |record| {
            let [f0, f1, f2, f3, t0, t1, cpu, action] = *record;
            let action = match action {
                0 => Action::Add,
                1 => Action::Remove,
                _ => return None,
            };
            let (file, task) = (u32::from_le_bytes([f0, f1, f2, f3]), u16::from_le_bytes([t0, t1]));
            (usize::from(cpu) < CPUS).then_some(Event { file, task, cpu, action })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds and removes of a file take turns, and the totals are the published ones.
    #[test]
    fn the_recordings_are_whole() {
        for (recording, records, files) in [(DBENCH64, 129_976, 447), (BUILD16, 94_611, 777)] {
            let events = recording.load().unwrap();
            assert_eq!(events.len(), records);
            let mut added_on = vec![None; files];
            let (mut removals, mut hits) = (0, 0);
            for event in &events {
                let on = &mut added_on[event.file as usize];
                match event.action {
                    Action::Add => assert_eq!(on.replace(event.cpu), None, "{event:?}"),
                    Action::Remove => {
                        removals += 1;
                        hits += u64::from(on.take().expect("it was added") == event.cpu);
                    }
                }
            }
            assert_eq!((removals, hits), (recording.removals, recording.cpu_hits));
        }
    }
}
