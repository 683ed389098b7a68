//! Makes room for a large block where the policy's next victims are small.
//!
//! A chunk has frames of one size, and can have another size only once all of them are free. The
//! victims that the policy picks one by one lie in different chunks, so nearly all buffers would be
//! evicted before a chunk is free.
//!
//! So a large buffer is evicted if one is among the next victims: as many as would make room for
//! the block if they lay side by side. The small ones before it stay due, for the next small
//! blocks. Only if there is none, small blocks have kept more than their share of the memory, and
//! lose a chunk: the policy's victims name the candidate chunks, and the buffers of the least used
//! one are evicted together, or none of them is. Most of these were not due. If each large block
//! took a chunk, the small ones would have fewer hits than with least recently used by bytes.

use super::Shared;
use super::evict::Batch;
use crate::cold::Cold;
use crate::few::Few;
use crate::frames::Frame;
use crate::hazard;
use crate::nodes::{On, Victim};
use crate::policy::{Buffers, Looks, is_evictable, mark};
use crate::word::{EVICT, NEW};

/// The largest number of frames of a chunk.
const MOST: usize = 128;

/// All frames of a chunk: those of buffers are marked `EVICT`, and the free ones are taken.
pub(super) type Chunk = Few<Victim, MOST>;

/// Returns the frames of a chunk that have buffers.
fn buffers(chunk: &Chunk) -> impl Iterator<Item = &Victim> {
    chunk.iter().filter(|victim| victim.on != On::Free)
}

impl Shared {
    /// Replaces victims that are smaller than the frames of `class` by a large enough buffer that
    /// comes up after them, and puts them back as the next victims. Returns whether there is one.
    pub(super) fn choose_large(&self, cold: &mut Cold, victims: &mut Batch, class: u8) -> bool {
        let mut next = cold.policy.next_due(&cold.nodes, None);
        // As many of the smallest as the frame has units.
        for _ in 0..1 << class {
            let Some(frame) = next else { return false };
            let entry = self.entry(frame);
            if frame.class() >= class && entry.word().used() == 0 && mark(entry) {
                let on = cold.nodes.on(frame);
                cold.withdraw(frame);
                if let On::Policy(list) = on {
                    cold.policy.lose(list, entry.key());
                }
                for victim in victims.iter().rev() {
                    self.spare_victim(cold, *victim, None);
                }
                victims.clear();
                victims.push(self.victim(frame, on));
                return true;
            }
            next = cold.policy.due_after(&cold.nodes, frame);
        }
        false
    }

    /// Takes the least used chunk of those that the victims lie in, and empties `victims`.
    ///
    /// The other victims are put back as the next to be evicted. If no chunk can be taken, or if
    /// the caller is `choosy` and the buffers of each chunk were used, all victims are put back as
    /// the last, because the next ones may be in better chunks.
    pub(super) fn choose_chunk(
        &self,
        cold: &mut Cold,
        victims: &mut Batch,
        choosy: bool,
        looks: &mut Looks,
    ) -> Option<Chunk> {
        let beside = |cold: &Cold, a: Frame, b: Frame| cold.chunk_of(a) == cold.chunk_of(b);
        let mut best: Option<(u64, Frame)> = None;
        for (at, victim) in victims.iter().enumerate() {
            if victims[..at].iter().any(|other| beside(cold, other.frame, victim.frame)) {
                continue;
            }
            let Some((buffers, uses)) = self.use_of_chunk(cold, victim.frame, victims) else {
                continue;
            };
            let is_hot = choosy && uses * 2 > buffers;
            let sum = buffers + uses;
            if !is_hot && best.is_none_or(|(least, _)| sum < least) {
                best = Some((sum, victim.frame));
            }
        }
        let chunk = best.and_then(|(_, of)| self.gather(cold, of, victims));
        // Backwards, so that they keep their order.
        for victim in victims.iter().rev() {
            match (&chunk, best) {
                (Some(_), Some((_, of))) if beside(cold, of, victim.frame) => {}
                (Some(_), _) => self.spare_victim(cold, *victim, None),
                (None, _) => self.spare_victim(cold, *victim, Some(looks)),
            }
        }
        victims.clear();
        chunk
    }

    /// Returns the number of buffers of a chunk and the sum of their uses, or `None` if one of them
    /// cannot be evicted.
    fn use_of_chunk(&self, cold: &mut Cold, of: Frame, victims: &Batch) -> Option<(u64, u64)> {
        let (mut buffers, mut uses) = (0, 0);
        for frame in cold.frames_beside(of) {
            let node = cold.nodes.of(frame);
            match node.on {
                On::Free => continue,
                On::Policy(_) => {
                    let word = self.entry(frame).word();
                    if !is_evictable(word) {
                        return None;
                    }
                    uses += word.used();
                }
                On::None if victims.iter().any(|victim| victim.frame == frame) => {}
                On::None | On::Dead => return None,
            }
            buffers += 1;
        }
        Some((buffers, uses))
    }

    /// Takes all frames of a chunk, or none. The caller has taken the frames of `victims` already.
    fn gather(&self, cold: &mut Cold, of: Frame, victims: &Batch) -> Option<Chunk> {
        let is_victim = |one: &Victim| victims.iter().any(|other| other.frame == one.frame);
        let mut chunk = Chunk::new(Victim::NONE);
        for frame in cold.frames_beside(of) {
            let on = cold.nodes.on(frame);
            match on {
                On::Free => {
                    cold.hold(frame);
                    chunk.push(Victim { frame, place: 0, on });
                }
                On::Policy(_) if mark(self.entry(frame)) => {
                    cold.withdraw(frame);
                    chunk.push(Victim { frame, place: self.frames.header(frame).place(), on });
                }
                On::None => {
                    let mine = victims.iter().find(|victim| victim.frame == frame);
                    // `use_of_chunk` found that each such frame is one of the victims.
                    chunk.push(*mine?);
                }
                _ => {
                    // A thread uses the buffer since `use_of_chunk`.
                    for one in chunk.iter().rev().filter(|one| !is_victim(one)) {
                        self.spare_victim(cold, *one, None);
                    }
                    return None;
                }
            }
        }
        for one in chunk.iter().filter(|one| !is_victim(one)) {
            if let On::Policy(list) = one.on {
                cold.policy.lose(list, self.table.entry(one.place).key());
            }
        }
        Some(chunk)
    }

    /// Puts a victim that is not evicted back: as the last if `behind`, otherwise as the next.
    ///
    /// Clears `EVICT` under the lock of the lists, so that a thread that then invalidates the
    /// buffer finds it on a list.
    fn spare_victim(&self, cold: &mut Cold, victim: Victim, behind: Option<&mut Looks>) {
        let frame = victim.frame;
        if victim.on == On::Free {
            return self.give_to(cold, frame);
        }
        let entry = self.table.entry(victim.place);
        entry.change(0, if behind.is_some() { EVICT | NEW } else { EVICT });
        match behind {
            None => cold.put_back(victim),
            Some(looks) => cold.keep(frame, looks),
        }
    }

    /// Frees a chunk unless a slot or a pin holds one of its buffers. Returns the number of freed
    /// buffers, and the result of `then`, which runs before the lock of the lists is released.
    pub(super) fn take_chunk<T>(
        &self,
        chunk: &Chunk,
        looks: &mut Looks,
        then: impl FnOnce(&mut Cold) -> Option<T>,
    ) -> (usize, Option<T>) {
        let Some(first) = buffers(chunk).next() else { return (0, None) };
        let mut entries = [self.table.entry(first.place); MOST];
        let mut len = 0;
        for (entry, victim) in entries.iter_mut().zip(buffers(chunk)) {
            *entry = self.table.entry(victim.place);
            len += 1;
        }
        let entries = &entries[..len];
        let mut in_use = [false; MOST];
        hazard::mark_protected(entries, &mut in_use);
        for (entry, in_use) in entries.iter().zip(&mut in_use) {
            // After the scan: a guard that becomes a pin pins before it clears its slot.
            *in_use |= entry.word().pins() > 0;
        }
        let mut gone = [false; MOST];
        if !in_use.contains(&true) {
            for ((entry, victim), gone) in entries.iter().zip(buffers(chunk)).zip(&mut gone) {
                self.table.lock(entry.key()).hide(victim.place);
                *gone = true;
            }
        }
        let mut cold = self.cold.lock();
        let (mut at, mut freed) = (0, 0);
        for victim in chunk.iter() {
            if victim.on == On::Free {
                self.give_to(&mut cold, victim.frame);
                continue;
            }
            if gone[at] {
                self.table.free(victim.place);
                self.give_to(&mut cold, victim.frame);
                freed += 1;
            } else {
                // As the last, because otherwise the next victims would be the same.
                self.spare_victim(&mut cold, *victim, Some(looks));
            }
            at += 1;
        }
        let result = then(&mut cold);
        drop(cold);
        self.counters.evictions.add(freed as i64);
        (freed, result)
    }
}
