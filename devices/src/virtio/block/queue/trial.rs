// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Trial of a measure that helps some drivers and hurts others. A *chance* is an opportunity to use the measure. The thread tries the
//! measure sometimes, and continues to use the measure while it helps. While the measure does not help, the thread tries the measure less
//! and less often.

/// Credit of a trial: `TRIAL` at its start, and at most `SURE` after gains. The trial ends when losses have used up the credit.
const TRIAL: u16 = 4;
const SURE: u16 = 16;

/// Number of chances that pass before a trial: `SOON` before the first trial, and at most `LATE` before a later trial.
const SOON: u16 = 64;
const LATE: u16 = 4096;

/// Maximum number of chances that pass before the next trial, after a sign that the measure may help now.
const AT_A_SIGN: u16 = 256;

/// Trial of a measure. The module documentation describes it.
#[derive(Debug)]
pub(super) struct Trial {
    is_on: bool,
    /// During a trial: the remaining credit. Otherwise: the number of chances until the next trial.
    left: u16,
    /// Number of chances between the end of a trial and the next trial.
    pause: u16,
}

impl Default for Trial {
    fn default() -> Self {
        Self { is_on: false, left: SOON, pause: SOON }
    }
}

impl Trial {
    /// Returns true if the measure is in use.
    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    /// Records that the measure was used and helped.
    pub(super) fn gained(&mut self) {
        self.left = SURE.min(self.left + 1);
        self.pause = SOON;
    }

    /// Records that the measure was used and did not help. Subtracts `cost` from the credit.
    pub(super) fn lost(&mut self, cost: u16) {
        self.left = self.left.saturating_sub(cost);
        if self.left == 0 {
            (self.is_on, self.left) = (false, self.pause);
            self.pause = LATE.min(self.pause * 2);
        }
    }

    /// Records a chance without the measure. `sign` is true if there is a sign that the measure may help now.
    pub(super) fn passed(&mut self, sign: bool) {
        self.left = self.left.min(if sign { AT_A_SIGN } else { LATE }) - 1;
        if self.left == 0 {
            (self.is_on, self.left) = (true, TRIAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates `chances` chances. The measure helps if `pays` is true. Returns the index of each chance at which the measure was used.
    fn done(trial: &mut Trial, pays: bool, chances: u16) -> Vec<u16> {
        let turn = |number| {
            let is_on = trial.is_on();
            match (is_on, pays) {
                (false, _) => trial.passed(false),
                (true, true) => trial.gained(),
                (true, false) => trial.lost(1),
            }
            is_on.then_some(number)
        };
        (0..chances).filter_map(turn).collect()
    }

    #[test]
    fn useful_measure_lasts_until_it_stops_helping() {
        let mut trial = Trial::default();
        assert_eq!(done(&mut trial, true, 1000), (SOON..1000).collect::<Vec<_>>());
        assert_eq!(done(&mut trial, false, SOON), (0..SURE).collect::<Vec<_>>());
    }

    #[test]
    fn losses_between_gains_do_not_end_the_trial() {
        let mut trial = Trial::default();
        done(&mut trial, true, 100);
        for _ in 0..100 {
            assert_eq!(done(&mut trial, false, SURE - 1).len(), usize::from(SURE - 1));
            assert_eq!(done(&mut trial, true, SURE).len(), usize::from(SURE));
        }
    }

    #[test]
    fn useless_measure_is_tried_less_and_less_often() {
        let mut trial = Trial::default();
        let begins: Vec<u16> = done(&mut trial, false, 30_000).into_iter().step_by(usize::from(TRIAL)).collect();
        let pauses: Vec<u16> = begins.windows(2).map(|pair| pair[1] - pair[0] - TRIAL).collect();
        assert_eq!(pauses[..4], [SOON, 2 * SOON, 4 * SOON, 8 * SOON]);
        assert!(pauses[7..].iter().all(|pause| *pause == LATE), "{pauses:?}");
    }

    #[test]
    fn promising_sign_brings_the_next_trial_nearer() {
        let mut trial = Trial::default();
        done(&mut trial, false, 30_000);
        assert!(!trial.is_on() && trial.left > AT_A_SIGN);
        (0..AT_A_SIGN).for_each(|_| trial.passed(true));
        assert!(trial.is_on());
    }

    #[test]
    fn expensive_loss_ends_a_trial_at_once() {
        let mut trial = Trial::default();
        done(&mut trial, true, SOON);
        assert!(trial.is_on());
        trial.lost(TRIAL);
        assert!(!trial.is_on());
    }
}
