"""The rounds of the server's runs, from a site's call to the published state.

    queue               the server's runs, one at a time: enrolment, the current run, the operator's orders about sites
    intake              what a run's sites ask and send is judged; what counts becomes an event of the run
    run                 the loop: events, the pure machine, effects, and their results as events
    aggregation         a round's aggregation: which updates count, robust rules, the next state, its publication
    scores              who scores a published model, what the scores say, the best round, warnings
    secure_aggregation  the server's part of secure aggregation, and the table of its steps
    context             what all runs share, and how it is opened
    presence            who is there, and which site has which task open
    machine             the pure state machine, its rules, what it waits for, where a restart continues

Each imports those below it.
"""
