//! Whose turn it is: units of one head add to a tile's dQ in the order of their keys.
//!
//! Units are taken in order, and each waits only for earlier units, which are running or done. So there is no
//! deadlock.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Looks at the unit before this often before a thread lets others run: a tile takes microseconds.
const SPINS: usize = 1000;

/// How many tiles each unit is past.
pub(super) struct Turns(Vec<AtomicUsize>);

impl Turns {
    /// For so many units.
    pub(super) fn new(units: usize) -> Self {
        Self((0..units).map(|_| AtomicUsize::new(0)).collect())
    }

    /// Number of units.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Begins a unit, which comes after another in its head or is the first.
    pub(super) fn begin(&self, unit: usize, after: Option<usize>) -> Turn<'_> {
        Turn { own: &self.0[unit], before: after.map(|unit| &self.0[unit]) }
    }
}

/// A unit at work. When it is dropped, after a panic too, the unit is past all tiles.
pub(super) struct Turn<'a> {
    own: &'a AtomicUsize,
    before: Option<&'a AtomicUsize>,
}

impl Turn<'_> {
    /// Waits until the unit before is past tile number `tile`.
    pub(super) fn wait(&self, tile: usize) {
        let Some(before) = self.before else { return };
        let mut spins = 0;
        while before.load(Ordering::Acquire) <= tile {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }

    /// Says that this unit is past tile number `tile`.
    pub(super) fn pass(&self, tile: usize) {
        self.own.store(tile + 1, Ordering::Release);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.own.store(usize::MAX, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        sync::Mutex,
    };

    #[test]
    fn tiles_are_passed_in_the_order_of_units() {
        let (turns, log) = (Turns::new(3), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            for unit in [2, 1, 0] {
                let (turns, log) = (&turns, &log);
                scope.spawn(move || {
                    let turn = turns.begin(unit, unit.checked_sub(1));
                    for tile in 0..20 {
                        turn.wait(tile);
                        log.lock().unwrap().push((tile, unit));
                        turn.pass(tile);
                    }
                });
            }
        });
        let log = log.into_inner().unwrap();
        for tile in 0..20 {
            let units: Vec<_> = log.iter().filter(|entry| entry.0 == tile).map(|entry| entry.1).collect();
            assert_eq!(units, [0, 1, 2], "tile {tile}");
        }
    }

    #[test]
    fn a_unit_that_panics_holds_nobody_up() {
        let turns = Turns::new(2);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _turn = turns.begin(0, None);
            panic!("a fault");
        }));
        assert!(panicked.is_err());
        turns.begin(1, Some(0)).wait(7);
    }
}
