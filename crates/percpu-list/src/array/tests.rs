//! The array against a model: which anchors it holds, and how many of them an operation may move.

use proptest::prelude::*;

use offlock_percpu::CpuId;

use super::*;
use crate::anchor::UNLINKED;

/// An array, and the anchors that the tests insert and remove.
struct Model {
    array: Array,
    anchors: Box<[Anchor]>,
    /// For each anchor, whether it is in the array.
    inside: Vec<bool>,
}

impl Model {
    fn new(anchors: usize) -> Self {
        let anchors: Box<[_]> = (0..anchors).map(|_| Anchor::new(CpuId::new(0))).collect();
        Self { array: Array::new(), inside: vec![false; anchors.len()], anchors }
    }

    /// Creates an array with `entries` entries, each at the index that equals its number.
    fn with(entries: usize) -> Self {
        let mut model = Self::new(entries);
        model.insert(entries);
        model
    }

    fn count(&self) -> usize {
        self.inside.iter().filter(|&&inside| inside).count()
    }

    fn indexes(&self) -> Vec<u32> {
        self.anchors.iter().map(Anchor::index).collect()
    }

    /// Grows the array as the list does, once.
    fn make_room(&mut self) {
        if !self.array.has_room() {
            let mut growth = Growth::allocate(self.array.growth_size().unwrap()).unwrap();
            self.array.install(&mut growth);
            assert!(self.array.has_room());
        }
    }

    /// Inserts the first `count` anchors that are not in the array.
    fn insert(&mut self, count: usize) {
        let mut left = count;
        for id in 0..self.anchors.len() {
            if left == 0 || self.inside[id] {
                continue;
            }
            self.make_room();
            // SAFETY: there is room. The anchor is not in the array, and lives as long as the
            // array.
            unsafe { self.array.insert(NonNull::from(&self.anchors[id])) };
            self.inside[id] = true;
            left -= 1;
        }
    }

    /// Removes the entry at `from`, or the next after it.
    fn remove(&mut self, from: u32, may_move: bool) {
        let Some(index) = (from..self.array.len()).find(|&index| self.array.get(index).is_some())
        else {
            return;
        };
        let id = self.id(self.array.get(index).unwrap());
        let holes = self.array.holes;
        // SAFETY: `get` returned an entry at this index.
        unsafe { self.array.remove(index, may_move) };
        self.anchors[id].set_index(UNLINKED);
        self.inside[id] = false;
        if may_move {
            assert!(self.array.holes < holes || holes == 0, "a removal must close a hole");
        }
    }

    fn id(&self, anchor: NonNull<Anchor>) -> usize {
        // SAFETY: every entry of the array is one of `anchors`.
        unsafe { anchor.as_ptr().cast_const().offset_from(self.anchors.as_ptr()) as usize }
    }

    /// Checks the array against the model, and that at most `moves` entries have moved since their
    /// indexes were `before`.
    fn check(&self, before: &[u32], moves: usize) {
        self.array.validate();
        assert_eq!(self.array.entries() as usize, self.count());
        assert_eq!(self.array.has_room(), self.array.entries() < self.array.capacity);

        let mut found = Vec::new();
        self.array.for_each(|anchor| found.push(anchor));
        let gotten: Vec<_> = (0..self.array.len()).filter_map(|at| self.array.get(at)).collect();
        assert_eq!(found, gotten, "for_each and get");
        assert!(self.array.get(self.array.len()).is_none());
        let ids: Vec<_> = found.into_iter().map(|anchor| self.id(anchor)).collect();
        assert!(ids.iter().all(|&id| self.inside[id]), "an entry is not in the model");
        assert_eq!(ids.len(), self.count(), "an entry is missing, or there twice");

        let now = self.indexes();
        assert!(self.inside.iter().copied().eq(now.iter().map(|&index| index != UNLINKED)));
        let stayed = |&id: &usize| before[id] != UNLINKED && self.inside[id];
        let moved = (0..now.len()).filter(stayed).filter(|&id| before[id] != now[id]).count();
        assert!(moved <= moves, "{moved} entries moved");
    }
}

#[derive(Clone, Debug)]
enum Op {
    Insert(usize),
    /// Removes so many entries, from an index on.
    Remove(u32, usize, bool),
    /// Removes so many entries, from the end.
    Pop(usize, bool),
    /// Allocates growth as a thread that finds no room, and keeps it.
    Allocate,
    /// Installs growth that was kept, for which the array may have changed.
    Install(usize),
    /// Frees all surplus segments.
    Surplus,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let few = || prop_oneof![3 => 1..4_usize, 2 => 1..40_usize, 1 => 1..600_usize];
    let op = prop_oneof![
        5 => few().prop_map(Op::Insert),
        4 => (0..1_300_u32, few(), any::<bool>()).prop_map(|(at, n, may)| Op::Remove(at, n, may)),
        2 => (few(), any::<bool>()).prop_map(|(n, may)| Op::Pop(n, may)),
        2 => Just(Op::Allocate),
        2 => (0..4_usize).prop_map(Op::Install),
        1 => Just(Op::Surplus),
    ];
    prop::collection::vec(op, 1..60)
}

fn run(ops: &[Op]) {
    let mut model = Model::new(1_300);
    let mut growths = Vec::new();
    for op in ops {
        let before = model.indexes();
        let len = model.array.len();
        let moves = match *op {
            Op::Insert(count) => {
                model.insert(count);
                0
            }
            Op::Remove(from, count, may_move) => {
                for n in 0..count {
                    // The indexes are adjacent, so that the holes are.
                    model.remove((from + n as u32) % len.max(1), may_move);
                }
                if may_move { 2 * count } else { 0 }
            }
            Op::Pop(count, may_move) => {
                for _ in 0..count {
                    model.remove(model.array.len().saturating_sub(1), may_move);
                }
                if may_move { count } else { 0 } // each removal may close one hole
            }
            Op::Allocate => {
                growths.push(Growth::allocate(model.array.growth_size().unwrap()).unwrap());
                0
            }
            Op::Install(which) => {
                if !growths.is_empty() {
                    let mut growth = growths.swap_remove(which % growths.len());
                    let capacity = model.array.capacity;
                    model.array.install(&mut growth);
                    let grown = model.array.capacity - capacity;
                    assert!(
                        grown != 0 || growth.segment.is_some(),
                        "the segment was taken and the array did not grow"
                    );
                }
                0
            }
            Op::Surplus => {
                let used = model.array.len().div_ceil(SEGMENT).max(1) as usize;
                while let Some(segment) = model.array.pop_surplus() {
                    assert_eq!(segment.len, SEGMENT);
                    assert!(model.array.segments.len() > used, "one unused segment is kept");
                }
                assert!(model.array.segments.len() <= used + 1);
                assert!(!model.array.may_shrink() || model.array.len() == 0);
                0
            }
        };
        model.check(&before, moves);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Installs growth also after the array has changed.
    #[test]
    fn the_array_matches_the_model(ops in ops()) {
        run(&ops);
    }
}

/// The first segment is replaced by larger ones; then segments of full size are added.
#[test]
fn it_grows_by_a_larger_first_segment_then_by_whole_ones() {
    let mut model = Model::new(3 * 512 + 1);
    let mut capacities = Vec::new();
    for _ in 0..model.anchors.len() {
        let before = model.indexes();
        let capacity = model.array.capacity;
        model.insert(1);
        if model.array.capacity != capacity {
            assert_eq!(model.array.len(), capacity + 1, "it grows only when it is full");
            model.check(&before, 0);
            capacities.push(model.array.capacity);
        }
    }
    assert_eq!(capacities, [8, 32, 128, 512, 1024, 1536, 2048]);
    assert!(model.indexes().into_iter().eq(0..1537));
}

#[test]
fn entries_are_added_and_removed_at_the_end_of_a_segment() {
    for may_move in [true, false] {
        let mut model = Model::new(514);
        model.insert(513);
        let capacity = model.array.capacity;
        for len in [513, 512, 511, 512, 513, 514, 513, 512, 511, 510, 511, 512, 513] {
            let before = model.indexes();
            while model.array.len() > len {
                model.remove(model.array.len() - 1, may_move);
            }
            model.insert(len as usize - model.count());
            model.check(&before, 0);
            assert_eq!(model.array.len(), len);
        }
        assert_eq!(model.array.capacity, capacity, "no memory is allocated or freed there");
    }
}

/// Also from the second segment to the first.
#[test]
fn the_last_entry_moves_to_the_gap() {
    let mut model = Model::with(514);
    for (gap, last) in [(0, 513), (511, 512), (100, 512)] {
        let before = model.indexes();
        model.remove(gap, true);
        model.check(&before, 1);
        assert_eq!(model.anchors[last].index(), gap);
    }
    assert_eq!(model.array.len(), 511);
}

/// Entries keep their indexes while they must not move. Insertions fill holes first, the newest
/// hole first.
#[test]
fn holes_are_filled_and_not_closed_while_nothing_may_move() {
    let mut model = Model::with(1030);
    let before = model.indexes();
    for index in [3, 512, 511, 4, 1028] {
        model.remove(index, false);
        model.check(&before, 0);
    }
    assert_eq!((model.array.len(), model.array.entries()), (1030, 1025));
    assert_eq!([3, 4, 511, 512, 1028].map(|at| model.array.get(at)), [None; 5]);
    for (id, index) in [(3, 1028), (4, 4), (511, 511), (512, 512), (1028, 3)] {
        model.insert(1);
        model.check(&before, 5);
        assert_eq!(model.anchors[id].index(), index);
    }
    assert_eq!(model.array.len(), model.array.entries());
    assert!(model.array.first_hole == NO_INDEX);
}

/// Each removal closes one hole, and a removal of the last entry closes all holes before it.
#[test]
fn removals_that_may_move_close_holes() {
    let mut model = Model::with(600);
    for index in 100..120 {
        model.remove(index, false);
    }
    for left in (0..20).rev() {
        let before = model.indexes();
        model.remove(0, true);
        model.check(&before, 2);
        assert_eq!(model.array.holes, left);
    }
    assert_eq!(model.array.len(), 560);

    let before = model.indexes();
    for index in 7..559 {
        model.remove(index, false);
    }
    model.check(&before, 0);
    assert_eq!((model.array.len(), model.array.holes), (560, 552));
    model.remove(559, false);
    model.check(&before, 0);
    assert_eq!((model.array.len(), model.array.holes), (7, 0), "only holes were before it");
}

/// The array has grown since the growth was allocated.
#[test]
fn stale_growth_is_refused_or_fits() {
    let mut model = Model::new(4 * 512);
    let allocate = |model: &Model| Growth::allocate(model.array.growth_size().unwrap()).unwrap();
    let mut stale = vec![allocate(&model)];
    for entries in [8, 32, 128] {
        model.insert(entries - model.count());
        stale.push(allocate(&model));
        model.insert(1); // grows it
    }
    for (growth, cells) in stale.iter_mut().zip([8, 32, 128, 512]) {
        let before = model.indexes();
        model.array.install(growth);
        let left = growth.segment.as_ref().map(|segment| segment.len);
        let expected = if cells < 512 { (Some(cells), 512) } else { (None, 1024) };
        assert_eq!((left, model.array.capacity), expected);
        model.check(&before, 0);
    }
}

/// Several threads allocate the same segment. The array takes each while its directory has room.
#[test]
fn a_second_growth_needs_room_in_the_directory() {
    let mut model = Model::with(1024);
    let directory = model.array.segments.capacity();
    assert!(directory > 2, "else the next growth has a directory");
    let allocate = |model: &Model| Growth::allocate(model.array.growth_size().unwrap()).unwrap();
    let mut growths: Vec<_> = (0..directory).map(|_| allocate(&model)).collect();
    let mut installed = 0;
    for growth in &mut growths {
        let before = model.indexes();
        model.array.install(growth);
        installed += usize::from(growth.segment.is_none());
        model.check(&before, 0);
    }
    assert_eq!(installed, directory - 2, "the rest have no directory");
    let mut fresh = allocate(&model);
    model.array.install(&mut fresh);
    assert!(fresh.segment.is_none() && fresh.directory.is_empty());
    model.check(&model.indexes(), 0);
    assert_eq!(model.array.segments.len(), directory + 1);
}

/// All unused segments but one are freed, so adds and removals at that length allocate nothing.
#[test]
fn segments_are_given_back_as_it_empties() {
    let mut model = Model::with(4 * 512 + 1);
    let mut freed_at = Vec::new();
    while model.count() != 0 {
        model.remove(0, true);
        if model.array.may_shrink() && model.array.pop_surplus().is_some() {
            freed_at.push(model.array.len());
            model.check(&model.indexes(), 0);
            let capacity = model.array.capacity;
            model.insert(1);
            model.remove(0, true);
            assert_eq!(model.array.capacity, capacity, "the kept segment is used");
        }
    }
    assert_eq!(freed_at, [1536, 1024, 512]);
    assert_eq!(model.array.capacity, 1024);
    model.insert(model.anchors.len());
    model.check(&model.indexes(), 0);
}

/// The removal of the last entry pops the holes of several segments. Later removals free them all.
#[test]
fn segments_of_holes_are_given_back() {
    let mut model = Model::with(6 * 512);
    for index in 5..6 * 512 - 1 {
        model.remove(index, false);
    }
    model.remove(6 * 512 - 1, false);
    assert_eq!((model.array.len(), model.array.capacity), (5, 6 * 512));
    for segments in (2..6).rev() {
        assert!(model.array.may_shrink());
        assert!(model.array.pop_surplus().is_some());
        model.check(&model.indexes(), 0);
        assert_eq!(model.array.segments.len(), segments);
        model.remove(0, true);
    }
    assert!(model.array.pop_surplus().is_none());
    model.insert(6 * 512);
    model.check(&model.indexes(), 0);
}

#[test]
fn there_is_a_largest_array() {
    let at = |capacity| Array { capacity, ..Array::new() };
    assert!(at(NO_INDEX + 1 - 2 * SEGMENT).growth_size().is_ok());
    assert!(at(NO_INDEX + 1 - SEGMENT).growth_size().is_err(), "an index must not be `NO_INDEX`");
}

/// The cell of a hole encodes every index up to the last.
#[test]
fn a_hole_stores_its_neighbours() {
    for before in [0, 1, 511, 512, NO_INDEX - SEGMENT, NO_INDEX] {
        for after in [0, 1, 511, 512, NO_INDEX - SEGMENT, NO_INDEX] {
            let cell = hole(before, after);
            assert!(is_hole(cell));
            assert_eq!(neighbours(cell), (before, after));
        }
    }
    assert!(
        !is_hole(ptr::from_ref(&Anchor::new(CpuId::new(0))).cast_mut()),
        "an anchor is aligned"
    );
}
