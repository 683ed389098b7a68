//! The counters of an engine, and their sums.

use crate::scripted::scripted;

use aio_reap::EngineStats;

/// Returns the counters of an engine of `depth` that has reaped these numbers of completions at once.
fn after_reaps(depth: usize, sizes: &[usize]) -> EngineStats {
    let (engine, script) = scripted(depth);
    for &size in sizes {
        let plug = engine.plug();
        let nops: Vec<_> = (0..size).map(|_| engine.nop().submit().unwrap()).collect();
        drop(plug); // it reaps nothing, which does not count
        script.complete(size);
        engine.turn();
        nops.into_iter().for_each(|nop| assert_eq!(nop.wait().0.unwrap(), 0));
    }
    engine.stats()
}

#[test]
fn percentiles_count_reaps_not_completions() {
    assert_eq!(after_reaps(128, &[]).reap_sizes.percentile(50.0), 0);
    let stats = after_reaps(128, &[1, 1, 1, 128, 128]);
    let sizes = &stats.reap_sizes;
    assert_eq!((sizes.count(), sizes.sum()), (5, 3 + 256));
    let picked = [1.0, 60.0, 61.0, 100.0].map(|percentile| sizes.percentile(percentile));
    assert_eq!(picked, [1, 1, 128, 128]);
    assert_eq!([0, 1, 2, 128, 129].map(|size| sizes.at_least(size)), [5, 5, 2, 2, 0]);
    let page = stats.to_string();
    assert!(page.contains("percentile") && page.ends_with("128"), "{page}");
}

#[test]
fn engines_add_up_whichever_has_the_longer_histogram() {
    let (short, long) = (after_reaps(1, &[1]), after_reaps(4, &[4, 3]));
    let (mut a, mut b) = (short.clone(), long.clone());
    a.merge(&long);
    b.merge(&short);
    assert_eq!(a.reap_sizes, b.reap_sizes);
    assert_eq!((a.submissions, a.submitted, a.max_in_flight), (3, 8, 4));
    assert_eq!((a.reap_sizes.count(), a.reap_sizes.percentile(100.0)), (3, 4));
}
