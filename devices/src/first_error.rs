// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Sequences of steps that all run, even if some fail.

/// Runs all steps of an iterator. Returns the first error.
pub(crate) fn first_error<E>(steps: impl IntoIterator<Item = Result<(), E>>) -> Result<(), E> {
    steps.into_iter().fold(Ok(()), Result::and)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_steps_run_after_a_failed_one() {
        let mut taken = Vec::new();
        let outcome = first_error([Ok(()), Err(1), Err(2), Ok(())].into_iter().inspect(|step| taken.push(*step)));
        assert_eq!((outcome, taken.len()), (Err(1), 4));
        assert_eq!(first_error::<()>([Ok(())]), Ok(()));
    }
}
