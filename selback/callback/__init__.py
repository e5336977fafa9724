from selback.callback.batch import SelectionCallback
