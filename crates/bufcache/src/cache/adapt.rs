//! What an adaptive cache learns: the only place where the shadows of its policy meet its requests.

use super::{Reuse, Shared};
use crate::hazard;
use crate::policy::Samples;
use crate::word::Key;

impl Shared {
    /// A hit. If the block is in the sample, it is left to the shadows, without a write to shared memory.
    #[inline(always)]
    pub(super) fn note_hit(&self, key: Key) {
        if self.samples.takes_hit(key) {
            self.add_sample(key);
        }
    }

    #[cold]
    #[inline(never)]
    fn add_sample(&self, key: Key) {
        if let Some(record) = hazard::number() {
            self.samples.add(record, Samples::tag(key));
        }
    }

    /// A miss, in a cache that `is_full` or not. If the block is in the sample, the shadows get what hits have left
    /// to them, and this request; while another thread gives them theirs, this one is lost.
    pub(super) fn note_miss(&self, key: Key, reuse: Reuse, is_full: bool) {
        if reuse == Reuse::None || !self.samples.takes_miss(key) {
            return;
        }
        let Some(mut shadows) = self.shadows.try_lock() else { return };
        let Some(shadows) = shadows.as_mut() else { return };
        let mut changes = false;
        self.samples.drain(|tag| changes |= shadows.request(tag));
        changes |= shadows.request(Samples::tag(key));
        let is_settled = shadows.is_settled();
        // A settled cache has room for a while after it grows; a change of rule is told once, so it is followed then.
        if (is_full && !is_settled) || (is_settled && changes) {
            let limit = {
                let mut cold = self.cold.lock();
                cold.policy.set_rule(shadows.rule());
                cold.limit()
            };
            if let Some(factor) = shadows.settle(limit) {
                self.samples.open(factor);
            }
        }
    }
}
