//! M8: a task sends and receives, and never has to wait.

use std::hint::black_box;

use harness::{Case, Group, Plan, Report};

use crate::peers::block_on;
use crate::queue::{OPEN, Ours, Queue, pair};

const AWAITED: &str = "mq-rbtree bitmap, awaited";
const PEER: &str = "async-priority-channel, awaited";

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let ours = <Ours as Queue>::new(1024);
    let (sender, receiver) = async_priority_channel::bounded(1024);
    let rounds = Group::new("send and receive, one task")
        .case(pair(&ours, Ours::NAME, 1))
        .case(Case::batched(AWAITED, 1, |_| {
            |ops| {
                block_on(async {
                    for n in 0..ops {
                        ours.send_async(n, 0).await.expect(OPEN);
                        black_box(ours.receive_async().await.expect(OPEN));
                    }
                });
            }
        }))
        .case(Case::batched(PEER, 1, |_| {
            |ops| {
                block_on(async {
                    for n in 0..ops {
                        sender.send(n, 0_u32).await.expect(OPEN);
                        black_box(receiver.recv().await.expect(OPEN));
                    }
                });
            }
        }))
        .run(plan);
    report.show(&rounds);
    report.against(&rounds, AWAITED, 1, &[PEER]);
    let ratio = rounds.time_ratio(&format!("{AWAITED}/1"), &format!("{}/1", Ours::NAME));
    report.record("M8.async_vs_blocking", ratio);
}
