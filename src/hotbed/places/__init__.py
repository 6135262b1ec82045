"""Where rows lie: the places, behind one type that nothing else looks through."""
