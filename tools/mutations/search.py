"""Breakages of searches: what is charged, when, and what leaves the private folder."""

from __future__ import annotations

from tools.mutations.mutation import mutations

SEARCH = (
    *mutations(
        "tune/test_search",
        "tune/search.py",
        (
            "trials are not charged",
            "            ledger.charge_trial(releases, trial=number, attempt=attempt)\n        return attempt, noise",
            "            pass\n        return attempt, noise",
        ),
        (
            "the final run is not charged",
            "                    ledger.charge_trial(releases, trial=FINAL_NUMBER, attempt=attempt, final_run=True)\n",
            "",
        ),
        (
            "the table is released with the best-of price",
            "        if self.best_of:\n            return None\n        rows = self._table()",
            "        rows = self._table()",
        ),
        (
            "trials of the best-of price are shown",
            "        if not self.best_of:\n            self.callback.message(text)",
            "        self.callback.message(text)",
        ),
        (
            "a lost trial starts again for free",
            "        return started and not can_continue(self.place.trial_path(number, attempt))",
            "        return False",
        ),
        (
            "a trial runs with other settings than were charged",
            "if before[attempt] == release_list(releases) and not self._is_lost(number, attempt):",
            "if not self._is_lost(number, attempt):",
        ),
        (
            "private images may be public search data",
            "        require_other_images(data, rehearsal[1])\n",
            "",
        ),
        ("a search continues on other images", '        if stored["data"] != known:', "        if False:"),
        ("charges may be rolled back with their mark", "            if missing:\n", "            if False:\n"),
        ("the list of trials may be rolled back", "            if unlisted:\n", "            if False:\n"),
        (
            "an own model may mix the images of a private score",
            "    if private and config.model is not None and is_own(config.model.name):",
            "    if False:",
        ),
        (
            "private test images score as public",
            '    return settings.score == "private" or not public',
            '    return settings.score == "private"',
        ),
    ),
    *mutations(
        "tune/test_search",
        "release/search_claim.py",
        (
            "a search is priced as one run",
            "bounds_of(charges_of(search), delta",
            "bounds_of(tuple((event, 1) for event, _ in charges_of(search)), delta",
        ),
        (
            "one mean for all distributions",
            '            mean_trials=payload["mean_trials"],',
            "            mean_trials=1.0,",
        ),
    ),
    *mutations(
        "tune/test_search",
        "release/verify.py",
        ("a search may be hidden", "    _check_search_mark(certificate, search, findings)\n", ""),
    ),
    *mutations(
        "tune/test_search",
        "release/statements.py",
        (
            "a trial alone is for release",
            '    if not searched and any(note["what"] == TRIAL for note in notes):',
            "    if False:",
        ),
    ),
    *mutations(
        "tune/test_search_plan",
        "tune/search_plan.py",
        ("scores are free", "        if self.score_noise is not None and not final_run:", "        if False:"),
        (
            "a learning search gets the best-of price",
            '            best_of and settings.sampler not in ("random", "grid"),',
            "            False,",
        ),
        (
            "costs may follow results without a filter",
            "        if varies and (settings.adaptive or share is not None):",
            "        if False:",
        ),
    ),
    *mutations(
        "tune/test_trial",
        "tune/trial.py",
        ("a trial releases more than was charged", "    if beyond:\n", "    if False:\n"),
        (
            "all trials share a key",
            'Keys(keys.derive("search", "trial", number, attempt)',
            'Keys(keys.derive("search", "trial")',
        ),
        (
            "a unit counts with all its rows",
            "    return int(((2 * right > rows) & (rows > 0)).sum())",
            "    return int(right.sum())",
        ),
    ),
    *mutations(
        "tune/test_trial_book",
        "tune/trial_book.py",
        (
            "the number of trials is its mean",
            '    (share,) = _uniforms(keys, 1, "number of trials")',
            '    return settings.trials\n    (share,) = _uniforms(keys, 1, "number of trials")',
        ),
        (
            "trials share their settings",
            'len(self._space.dimensions), "settings", number)',
            'len(self._space.dimensions), "settings")',
        ),
        ("errors show passwords", "text = redacted(", "text = str("),
    ),
    *mutations(
        "tune/test_search",
        "release/composition.py",
        ("lists show the epsilon of the chosen run alone", "        if searched.exists():\n", "        if False:\n"),
    ),
    *mutations(
        "tune/test_search",
        "release/run_facts.py",
        (
            "curves show the epsilon of the chosen run alone",
            "    if found is not None and checked.search is not None:",
            "    if False:",
        ),
    ),
    *mutations(
        "tune/test_search_folder",
        "tune/search_folder.py",
        ("a ledger may be rolled back", "at_least=mark, before_growth", "at_least=None, before_growth"),
    ),
    *mutations(
        "tune/test_search_prices",
        "accounting/selection.py",
        (
            "the mean number of trials costs nothing",
            "penalty = math.log(mean_trials) / (orders - 1)",
            "penalty = 0 * orders",
        ),
        ("a Poisson number of trials costs nothing", "mean_trials * _deltas_of_one", "0 * _deltas_of_one"),
        ("a geometric number costs what a logarithmic costs", "return (1 + shape) * float", "return float"),
        ("trials are priced as one", "[(event, count * trials) for event, count", "[(event, count) for event, count"),
    ),
    *mutations(
        "tune/test_search_plan",
        "tune/search_plan.py",
        (
            "early candidates are charged for all of their steps' noise",
            "        early = None if final_run else self.settings.early",
            "        early = None",
        ),
        (
            "the final run is as short as its candidates",
            "        early = None if final_run else self.settings.early",
            "        early = self.settings.early",
        ),
    ),
    *mutations(
        "cli/test_tune_command",
        "cli/tune_command.py",
        (
            "trials of the best-of price are drawn",
            '    if price != "composition":',
            "    if False:",
        ),
    ),
    *mutations(
        "tune/test_trial_book",
        "tune/trial_book.py",
        ("a database that does not answer leaves a folder", "        engine.connect().close()\n", ""),
    ),
)
