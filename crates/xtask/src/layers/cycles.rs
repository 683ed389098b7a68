//! Groups of files that import each other, and the imports that close the circles.

use std::collections::BTreeMap;

use super::resolver::Edges;

/// Files of which each leads to each other one.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Component {
    pub(super) files: Vec<usize>,
    /// The imports among them.
    pub(super) inside: Vec<(usize, usize)>,
    /// Few of these, without which there is no cycle. Not always the fewest.
    pub(super) closing: Vec<(usize, usize)>,
}

/// Returns the groups of more than one file, among `count` files.
pub(super) fn components(count: usize, edges: &Edges) -> Vec<Component> {
    let mut next: Vec<Vec<usize>> = vec![Vec::new(); count];
    for &(from, to) in edges.keys() {
        next[from].push(to);
    }
    let reach: Vec<Vec<bool>> = (0..count).map(|from| reachable(&next, from)).collect();
    let mut grouped = vec![false; count];
    let mut components = Vec::new();
    for file in 0..count {
        let together = |other: usize| reach[file][other] && reach[other][file];
        let files: Vec<usize> = (0..count).filter(|&other| together(other)).collect();
        if grouped[file] || files.len() < 2 {
            continue;
        }
        files.iter().for_each(|&file| grouped[file] = true);
        let has = |file: &usize| files.contains(file);
        let inside: Vec<_> =
            edges.keys().filter(|(from, to)| has(from) && has(to)).copied().collect();
        let closing = closing(&files, &inside, edges);
        components.push(Component { files, inside, closing });
    }
    components
}

/// Returns which files a file leads to, by one import or more.
fn reachable(next: &[Vec<usize>], from: usize) -> Vec<bool> {
    let mut seen = vec![false; next.len()];
    let mut open = vec![from];
    while let Some(file) = open.pop() {
        for &to in &next[file] {
            if !seen[to] {
                seen[to] = true;
                open.push(to);
            }
        }
    }
    seen
}

/// Orders the files so that few lines import against the order, and returns those imports.
///
/// Files move to their best places as long as that helps; the first order is by how much more a file
/// imports than it is imported.
fn closing(files: &[usize], inside: &[(usize, usize)], edges: &Edges) -> Vec<(usize, usize)> {
    let lines = |edge: &(usize, usize)| {
        let mut lines: Vec<usize> = edges[edge].iter().map(|(line, _)| *line).collect();
        lines.dedup();
        lines.len()
    };
    let weights: BTreeMap<(usize, usize), usize> =
        inside.iter().map(|edge| (*edge, lines(edge))).collect();
    let weight = |from: usize, to: usize| weights.get(&(from, to)).copied().unwrap_or(0);
    let sum = |pairs: &dyn Fn(usize) -> usize| files.iter().map(|&file| pairs(file)).sum::<usize>();
    let mut order = files.to_vec();
    order.sort_by_key(|&file| {
        let (out, into) = (sum(&|to| weight(file, to)), sum(&|from| weight(from, file)));
        (into as isize - out as isize, file)
    });
    // A file at an earlier place may import those after it.
    let cost = |order: &[usize]| {
        let pairs = order.iter().enumerate();
        pairs.map(|(at, &file)| order[..at].iter().map(|&to| weight(file, to)).sum::<usize>()).sum()
    };
    let mut best: usize = cost(&order);
    let mut improved = true;
    while improved {
        improved = false;
        for from in 0..order.len() {
            for to in 0..order.len() {
                let mut moved = order.clone();
                let file = moved.remove(from);
                moved.insert(to, file);
                let cost = cost(&moved);
                if cost < best {
                    (order, best, improved) = (moved, cost, true);
                }
            }
        }
    }
    let place = |file: usize| order.iter().position(|&other| other == file);
    inside.iter().filter(|(from, to)| place(*from) > place(*to)).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edges(pairs: &[(usize, usize, usize)]) -> Edges {
        let lines = |count: usize| (0..count).map(|line| (line, "x".to_string())).collect();
        pairs.iter().map(|&(from, to, count)| ((from, to), lines(count))).collect()
    }

    #[test]
    fn layers_have_no_cycle() {
        assert!(components(4, &edges(&[(0, 1, 1), (0, 2, 1), (1, 3, 1), (2, 3, 1)])).is_empty());
        assert!(components(0, &Edges::new()).is_empty());
    }

    #[test]
    fn the_rarest_import_of_a_circle_closes_it() {
        let found = components(5, &edges(&[(0, 1, 3), (1, 2, 3), (2, 0, 1), (2, 3, 1), (4, 0, 1)]));
        let inside = vec![(0, 1), (1, 2), (2, 0)];
        assert_eq!(found, [Component { files: vec![0, 1, 2], inside, closing: vec![(2, 0)] }]);
    }

    #[test]
    fn groups_are_apart() {
        let found = components(4, &edges(&[(0, 1, 1), (1, 0, 2), (2, 3, 1), (3, 2, 1), (1, 2, 1)]));
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].closing, [(0, 1)]);
        assert_eq!(found[1].files, [2, 3]);
    }
}
